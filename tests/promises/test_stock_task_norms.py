"""Stock strategies with norms of each task: training, replay, distillation and unlearning."""

import copy
from functools import partial

import pytest
import torch
from avalanche.training.supervised import EWC, LwF, Naive, Replay
from support import strategies
from support.strategies import DIGITS, Hears, accuracy, stock
from support.strategy_state import bits, same_state, unlearning_plugin
from torch import nn

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.baselines.dark_replay import DarkReplayPlugin
from avalanche_amnesia.evaluation import unlearned_accuracy_metrics
from avalanche_amnesia.evaluation.probes import copy_probe, features_of
from avalanche_amnesia.models import TaskNormModel

HOSTS = {
    "naive": (Naive, {}),
    "ewc online": (EWC, {"ewc_lambda": 10.0, "mode": "online", "decay_factor": 0.5}),
    "lwf": (LwF, {"alpha": 1.0, "temperature": 2.0}),
    "replay": (Replay, {"mem_size": 30}),
    "der++": (Naive, {"plugins": (DarkReplayPlugin(memory_per_task=10),)}),
}


def model():
    """A convolution with BatchNorm, one inside of a block with GroupNorm, and a linear layer with LayerNorm."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Sequential(nn.Conv2d(8, 12, 3, stride=2), nn.GroupNorm(2, 12), nn.ReLU()), nn.Flatten()]
    return TaskNormModel(nn.Sequential(*layers, nn.Linear(108, 24), nn.LayerNorm(24), nn.ReLU()), 24)


def strategy(host="naive", **options):
    make, own = HOSTS[host]
    return stock(make, model=model(), **{"epochs": 1, **copy.deepcopy(own), **options})


trained = partial(strategies.trained, maker=strategy)


def statistics(model, task):
    return {name: value.clone() for name, value in model.task_parts(task).named_buffers()}


@pytest.mark.parametrize("host", [host for host in HOSTS if host != "naive"])
def test_every_strategy_learns_unlearns_and_trains_on(host):
    made, kept = strategy(host, epochs=8), {}
    initial = bits(made.model.backbone[1])
    for task in range(3):
        made.train(DIGITS.train_stream[task])
        assert accuracy(made, DIGITS.test_stream[task]) > 0.9
        for earlier, values in kept.items():  # replay and distillation change no statistics
            assert same_state(statistics(made.model, earlier), values)
        kept[task] = statistics(made.model, task)
        assert kept[task]["1.num_batches_tracked"] > 0
    record = unlearning_plugin(made).unlearn(made, [1])
    assert {"heads.1.own.1.running_mean", "heads.1.own.3/1.weight", "heads.1.weight"} <= {*record.plan.removed}
    assert record.plan.shared_state == ()
    assert not [name for name in made.model.state_dict() if name.startswith("heads.1.")]
    assert made.model.task_parts(1) is None
    made.train(DIGITS.train_stream[3])
    assert accuracy(made, DIGITS.test_stream[3]) > 0.9
    for task in (0, 2):
        assert same_state(statistics(made.model, task), kept[task])
    assert bits(made.model.backbone[1]) == initial  # it runs for no task: where new tasks begin


def test_a_mixed_batch_changes_only_the_statistics_of_the_task_in_training():
    made = trained(1)
    seen = []

    def look(made):
        x = torch.cat([made.mb_x[:8], DIGITS.train_stream[0].tensors[0][:8]])
        before = statistics(made.model, 0)
        alone = copy.deepcopy(made.model)
        made.model(x, torch.tensor([1] * 8 + [0] * 8))
        alone(x[:8], 1)
        seen.append(
            same_state(statistics(made.model, 0), before)
            and same_state(statistics(made.model, 1), statistics(alone, 1))
            and int(statistics(alone, 1)["1.num_batches_tracked"]) > 0
        )

    made.plugins.append(Hears(before_forward=look))
    made.train(DIGITS.train_stream[1])
    assert seen
    assert all(seen)


def test_metrics_read_an_unlearned_task_through_its_former_norms():
    naive = trained(2)
    x, _ = task_data(DIGITS.test_stream[0])
    wanted, probe = features_of(naive.model, x, task=0), copy_probe(naive.model, 0)
    naive.model.remove_task(0)
    (metric,) = unlearned_accuracy_metrics(DIGITS)
    metric.probes[0] = probe
    assert torch.equal(metric.probed_features(naive.model, naive.model, x, 0, (1,), "own"), wanted)
    through_given = metric.probed_features(naive.model, naive.model, x, 0, (1,), "none")
    assert not torch.equal(through_given, wanted)
    with torch.no_grad():
        assert torch.equal(metric.probed_logits(naive.model, x, 0), probe.head(wanted))
    metric.probes.clear()  # keep_probes=False
    assert metric.probed_features(naive.model, naive.model, x, 0, (1,), "own") is None
    assert torch.equal(metric.probed_features(naive.model, naive.model, x, 1, (1,), "none"), through_given)
