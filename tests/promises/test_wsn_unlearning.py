"""WSN forgets: what one task alone owned is initial again, what others read stays and is on record."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from support.residue_oracle import tensors_within
from support.strategies import DIGITS, NormedConvNet, learn, logits, make, mlp
from support.strategy_state import bits, fingerprint, state, trajectory, unchanged, unlearning_plugin
from support.wandb_files import read_offline_run

from avalanche_amnesia import evaluation
from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.logging import WandBLogger
from avalanche_amnesia.models import SubnetModel
from avalanche_amnesia.models.mask_codes import pack_bits
from avalanche_amnesia.training import WSN, ScoredWeights
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import SubnetPlugin, TrajectoryPlugin


def wsn(*, bias="off", density=0.3, economies=None, **options):
    if economies is not None:
        options["trajectory"] = TrajectoryPlugin(**economies)
    return make(WSN, wrap=partial(SubnetModel, density=density, bias=bias), **options)


def weights(model):
    return {name: model.backbone.get_parameter(name).detach().view(-1).clone() for name in model.graph.layers}


CASES = [
    pytest.param({}, id="adam"),
    pytest.param({"optimizer": "adamw", "bias": "masked", "reset_optimizer": False}, id="kept adamw, masked biases"),
    pytest.param(
        {"net": NormedConvNet, "optimizer": "momentum", "masks": ScoredWeights(scores="redraw")},
        id="conv, redrawn scores",
    ),
    pytest.param({"net": NormedConvNet, "masks": ScoredWeights(keep="best"), "density": 0.7}, id="conv, best, dense"),
    pytest.param({"economies": {"dtype": torch.int8}}, id="coded updates"),
    pytest.param({"masks": ScoredWeights(score_bits=2)}, id="coded scores"),
]


@pytest.mark.parametrize("options", CASES)
def test_any_sequence_leaves_initial_bits_where_nobody_is_and_remaining_tasks_alone(options):
    for seed in range(2):
        draw, strategy = random.Random(seed), wsn(**options)
        initial, names = weights(strategy.model), set(strategy.model.state_dict())
        for _ in range(8):
            remaining = list(unlearning_plugin(strategy).ledger.remaining)
            before = {task: logits(strategy, DIGITS.test_stream[task]) for task in remaining}
            if len(remaining) == 5 or (len(remaining) > 1 and draw.random() < 0.5):
                gone = draw.sample(remaining, draw.randint(1, min(3, len(remaining))))
                record = strategy.unlearn(gone)
                assert record.affected == ()
                kept = [n.split(".") for n in strategy.model.state_dict() if not n.startswith("backbone.")]
                assert not set(gone) & {int(parts[1]) for parts in kept if len(parts) > 1}
            else:
                strategy.train(DIGITS.train_stream[draw.choice([t for t in range(5) if t not in remaining])])
            remaining = unlearning_plugin(strategy).ledger.remaining
            assert all(
                torch.equal(logits(strategy, DIGITS.test_stream[task]), before[task])
                for task in remaining
                if task in before
            )
            assert trajectory(strategy).tasks == remaining == strategy.model.masked_tasks
            free = strategy.model.by_layer(~strategy.model.cumulative_mask())
            for name, value in weights(strategy.model).items():
                assert bool(same_bits(value, initial[name])[free[name]].all()), name
        if remaining:
            strategy.unlearn(remaining)
        assert set(strategy.model.state_dict()) == names
        assert all(bool(same_bits(value, initial[name]).all()) for name, value in weights(strategy.model).items())
        assert trajectory(strategy).nbytes() == 0


def test_shared_weights_stay_and_are_on_record(tmp_path):
    strategy = learn(wsn(), DIGITS.train_stream[:4])
    model, initial = strategy.model, weights(wsn().model)
    masks, before = {t: model.masks[t] for t in range(4)}, weights(model)
    plan = strategy.plan_unlearning([1])
    record = strategy.unlearn([1])
    assert record.plan == plan
    assert record.claim == "approximate"
    after = weights(model)
    listed = record.plan.shared
    assert "backbone.layers.0.weight" in listed
    for name, value in after.items():
        moved_by_it = masks[1][name] & ~masks[0][name] & ~same_bits(before[name], initial[name])
        read = masks[2][name] | masks[3][name]
        assert torch.equal(value[read], before[name][read])
        alone = moved_by_it & ~read
        assert alone.any()
        assert bool(same_bits(value, initial[name])[alone].all())
        shared = moved_by_it & read
        assert plan.entries[f"backbone.{name}"] == int(alone.sum())
        if not shared.any():
            assert f"backbone.{name}" not in listed
            continue
        entry = listed[f"backbone.{name}"]
        assert entry.entries == int(shared.sum()) > 0
        assert entry.tasks == tuple(t for t in (2, 3) if (masks[t][name] & shared).any())
    record.save(tmp_path / "record.json")
    saved = json.loads((tmp_path / "record.json").read_text())["plan"]["shared"]
    assert saved == {name: {"entries": e.entries, "tasks": list(e.tasks)} for name, e in listed.items()}


def test_what_a_forgotten_task_left_with_others_goes_with_the_last_of_them():
    strategy, initial = learn(wsn(), DIGITS.train_stream[:4]), weights(wsn().model)
    strategy.unlearn([1])
    record = strategy.unlearn([2])
    model = strategy.model
    assert model.masked_tasks == (0, 3)
    assert all(entry.tasks == (3,) for entry in record.plan.shared.values())
    strategy.unlearn([3])
    reference = learn(wsn(), DIGITS.train_stream[:1])
    assert all(torch.equal(value, weights(reference.model)[name]) for name, value in weights(model).items())
    strategy.unlearn([0])
    assert all(bool(same_bits(value, initial[name]).all()) for name, value in weights(model).items())


# Claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"net": NormedConvNet, "masks": ScoredWeights(keep="best")},
        {"masks": ScoredWeights(scores="redraw"), "bias": "masked"},
        {"masks": ScoredWeights(score_bits=1)},
        {"masks": ScoredWeights(score_bits=3)},
    ],
    ids=str,
)
def test_what_is_called_exact_equals_the_retrained_model_bit_for_bit(options):
    references = evaluation.References(lambda **kw: wsn(**options, **kw), DIGITS)

    def equals_reference():
        reference = references.reference(unlearning_plugin(strategy).ledger.remaining)
        return list(bits(strategy.model).items()) == list(bits(reference).items())

    strategy = learn(wsn(**options), DIGITS.train_stream[:4])
    assert strategy.unlearn([3]).claim == "exact"
    reference = references.reference([0, 1, 2])
    assert all(torch.equal(strategy.model.binary_mask(t), reference.binary_mask(t)) for t in (0, 1, 2))
    strategy.train(DIGITS.train_stream[4])  # and on: the scores were back too
    assert equals_reference()
    record = strategy.unlearn([2, 4])
    assert record.claim == "exact"
    assert record.plan.shared == {}
    strategy.train(DIGITS.train_stream[2])  # learned again
    assert equals_reference()
    assert strategy.unlearn([1]).claim == "approximate"
    strategy.train(DIGITS.train_stream[3])
    assert not equals_reference()
    assert strategy.unlearn([2, 3]).claim == "exact"
    strategy.train(DIGITS.train_stream[1])
    assert equals_reference()


def test_scores_that_came_out_of_a_forgotten_task_are_gone():
    strategy = learn(wsn(), DIGITS.train_stream[:1])
    then = strategy.model.last_scores()
    learn(strategy, DIGITS.train_stream[1:4])
    strategy.unlearn([1])
    assert torch.equal(strategy.model.last_scores(), then)
    strategy.unlearn([0])
    assert strategy.model.last_scores() is None


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_coded_scores_take_few_bits_per_unlearnable_task_and_survive_being_saved(bits):
    strategy = learn(wsn(masks=ScoredWeights(score_bits=bits)), DIGITS.train_stream[:3])
    model = strategy.model
    kept = {n: value for n, value in model.state_dict().items() if n.startswith("_scores.")}
    assert len(kept) == 3
    table = 2 * 65 * 4 * len(model.graph.layers)
    assert all(value.nbytes <= table + (bits - 1) * -(-model.n_weights // 8) for value in kept.values())
    loaded = wsn().model  # the code says how many bits it has
    loaded.load_state_dict(model.state_dict())
    scores = loaded.last_scores()
    assert torch.equal(scores, model.last_scores())
    assert torch.equal(loaded.choose(scores).bool(), loaded.binary_mask(2))


def test_scores_are_kept_for_unlearnable_tasks_alone():
    strategy = wsn()
    for experience in DIGITS.train_stream[:4]:
        strategy.train(experience)
        if experience.task_label in (1, 2):
            strategy.mark_permanent([experience.task_label])
    kept = {int(n.split(".")[1]) for n in strategy.model.state_dict() if n.startswith("_scores.")}
    assert kept == {2, 3}  # 3's own, and 2's to go back to; nothing lies before 0 but the seed
    assert strategy.unlearn([3]).claim == "exact"


def test_all_or_nothing():
    class Fails(EvaluationPlugin):
        def after_unlearning(self, strategy, **kwargs):
            raise RuntimeError("metrics fail")

    strategy = learn(wsn(net=NormedConvNet, evaluator=Fails(loggers=[BaseLogger()])), DIGITS.train_stream[:3])
    with unchanged(lambda: fingerprint(strategy)), pytest.raises(RuntimeError, match="metrics fail"):
        strategy.unlearn([0, 2])
    assert strategy.model.masked_tasks == (0, 1, 2)


@pytest.mark.parametrize("keep", ["last", "best"])
def test_in_the_middle_of_a_task_the_scores_start_again_and_the_rest_is_initial(keep):
    class Watch(SubnetPlugin):
        seen: dict

        def before_forward(self, strategy, **kwargs):
            before = strategy.model.scores.detach().clone()
            super().before_forward(strategy, **kwargs)
            if not torch.equal(before, strategy.model.scores.detach()):
                self.seen[strategy.clock.train_exp_iterations] = strategy.model.scores.detach().clone()

    requests = [UnlearningRequest(tasks=(1,), at=2, when="iteration", iteration=3)]
    stream = with_unlearning(DIGITS, requests).train_stream
    strategy = wsn(masks=ScoredWeights(keep=keep))
    ours, watching = find_plugin(strategy, SubnetPlugin), Watch(masks=ScoredWeights(keep=keep))
    watching.seen = {}
    strategy.plugins = [watching if plugin is ours else plugin for plugin in strategy.plugins]
    initial = weights(strategy.model)
    strategy.train(stream[0])
    scores, zero = strategy.model.last_scores(), logits(strategy, DIGITS.test_stream[0])
    learn(strategy, stream[1:3])
    assert list(watching.seen) == [3]
    assert torch.equal(watching.seen[3], scores)
    assert strategy.model.masked_tasks == (0, 2)
    assert torch.equal(logits(strategy, DIGITS.test_stream[0]), zero)
    free = strategy.model.by_layer(~strategy.model.cumulative_mask())
    for name, value in weights(strategy.model).items():
        assert bool(same_bits(value, initial[name])[free[name]].all())
    assert strategy.unlearn([0, 2]).claim == "exact"
    assert all(bool(same_bits(v, initial[name]).all()) for name, v in weights(strategy.model).items())


# Metrics and logging ------------------------------------------------------------------------------------------------


def test_capacity_is_the_share_of_weights_that_nobody_uses():
    strategy = learn(wsn(), DIGITS.train_stream[:3])
    assert evaluation.network_capacity(strategy) == pytest.approx(
        1 - float(strategy.model.cumulative_mask().float().mean())
    )
    strategy.unlearn([0, 1, 2])
    assert evaluation.network_capacity(strategy) == 1.0


@pytest.mark.parametrize("net", [mlp, NormedConvNet])
def test_a_stream_with_requests_runs_through_every_metric_and_logger(net, tmp_path):
    benchmark = with_unlearning(DIGITS, {1: [0], 3: [1], 4: [4]}, permanent=[2])
    references = evaluation.References(lambda **kw: wsn(net=net, train_epochs=1, **kw), benchmark)
    with WandBLogger(dir=str(tmp_path), mode="offline") as logger:
        evaluator = EvaluationPlugin(
            accuracy_metrics(experience=True),
            evaluation.capacity_metrics(),
            evaluation.jsd_metrics(references),
            evaluation.accuracy_difference_metrics(references),
            evaluation.unlearned_accuracy_metrics(benchmark, references),
            loggers=[logger],
        )
        strategy = wsn(net=net, train_epochs=1, evaluator=evaluator)
        values = []
        for experience in benchmark.train_stream:
            strategy.train(experience)
            values.append(strategy.eval(benchmark.test_stream))
    assert [record.tasks for record in unlearning_plugin(strategy).records] == [(0,), (1,), (4,)]
    assert [record.claim for record in unlearning_plugin(strategy).records] == ["approximate"] * 3
    names = {name.split("/")[0] for name in values[-1]}
    wanted = {"JSD_own", "JSD_remaining", "JSD_own_floor_order", "AccuracyDifference", "UnlearnedAccuracy", "MaskBits"}
    assert wanted | {"Capacity", "MaskUse"} <= names
    run = next(Path(tmp_path).glob("wandb/offline-run-*/run-*.wandb"))
    logged = {key.split("/")[0] for row in read_offline_run(run).rows for key in row}
    assert wanted <= logged


def test_the_own_probe_looks_through_the_task_s_own_normalisation():
    """Straight after the unlearning of the last task its weights are gone, but not how it normalised: the probe's."""
    strategy = learn(wsn(net=NormedConvNet), DIGITS.train_stream[:2])
    metric = evaluation.unlearned_accuracy_metrics(DIGITS)[0]
    strategy.evaluator.metrics.append(metric)
    own = state(strategy.model.task_parts(1))
    strategy.unlearn([1], keep_probes=True)
    probed = metric.probes[1].parts.state_dict()
    assert probed.keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in probed.items())
    assert not [n for n in strategy.model.state_dict() if n.startswith("norms.1.")]


def test_no_tensor_of_model_or_plugins_repeats_the_forgotten_mask_or_its_scores():
    strategy = learn(wsn(masks=ScoredWeights(keep="best")), DIGITS.train_stream[:2])
    mask, scores = strategy.model.binary_mask(1), strategy.model.last_scores()
    parts = strategy.model.by_layer(mask).values()
    strategy.unlearn([1])
    plugins = [plugin for plugin in strategy.plugins if not isinstance(plugin, EvaluationPlugin)]
    reachable = tensors_within([strategy.model, plugins]) + tensors_within(strategy.optimizer)
    assert len(reachable) > 5
    for tensor in reachable:
        assert tensor.shape != scores.shape or not torch.equal(tensor, scores)
        for suspect in (mask, pack_bits(mask), *parts):
            if tensor.numel() == suspect.numel():
                assert not torch.equal(tensor.reshape(-1), suspect.to(tensor.dtype))
                assert suspect.dtype != torch.bool or not torch.equal(tensor.reshape(-1) != 0, suspect)
