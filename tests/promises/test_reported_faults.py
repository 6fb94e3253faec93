"""Faults of users' scripts that are named, or that no longer matter; most follow public bug reports."""

import copy
import inspect
import warnings
from functools import partial

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.models import SimpleMLP, as_multitask
from avalanche.training.plugins import AGEMPlugin, EWCPlugin, GEMPlugin, MASPlugin
from support import tiny
from support.small_networks import Net
from support.strategies import Hears, learn, make
from support.strategy_state import same_state
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from avalanche_amnesia import DisjointSubnets, UnlearningRequest, with_unlearning
from avalanche_amnesia.audit.record import RecordError, UnlearningRecord
from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.contrib.baselines import CLPUDERpp
from avalanche_amnesia.contrib.baselines.dark_replay import DarkReplayPlugin
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.lab.report.tables import csv_text
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.saving.files import read_state, write_state
from avalanche_amnesia.training import load_state
from avalanche_amnesia.unit_graph import ModelError

X, Y = tiny.samples(60, classes=6)
BENCHMARK = tiny.tasks(given=(X, Y))
STREAM = BENCHMARK.train_stream


def made(kind="pools", **options):
    return tiny.strategy(kind, optimizer=partial(Adam, lr=1e-2), train_mb_size=10, **options)


def averaging():
    """A plugin that writes the median of a task's weights when it ends, as SWA writes their mean."""

    def see(strategy):
        seen.append([value.detach().clone() for value in strategy.model.parameters()])

    @torch.no_grad()
    def write(strategy):
        for value, *steps in zip(strategy.model.parameters(), *seen, strict=True):
            value.copy_(torch.stack(steps).median(0).values)
        seen.clear()

    seen = []
    return Hears(after_update=see, after_training_exp=write)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_weights_that_a_plugin_writes_when_a_task_ends_are_unlearned_with_it(kind):
    strategy, retrained = (made(kind, plugins=[averaging()]) for _ in range(2))
    strategy.train(STREAM)
    retrained.train(STREAM[0])
    strategy.unlearn([1], allow_unknown=True)
    assert same_state(strategy.model.state_dict(), retrained.model.state_dict())


@pytest.mark.parametrize("plugin", [EWCPlugin(1.0), MASPlugin(), GEMPlugin(4, 0.5), AGEMPlugin(10, 8)])
def test_plugins_that_need_gradients_of_earlier_tasks_are_refused_with_weight_pools(plugin):
    strategy = made(plugins=[plugin])
    with pytest.raises(TaskError, match=f"Leave {type(plugin).__name__} out of plugins"):
        strategy.train(STREAM[0])
    assert not strategy.model.tasks


class WithEmptyBatches(DisjointSubnets):
    def make_train_dataloader(self, **kwargs):
        batches = [[0, 1, 2], [], [3, 4], []] if self.empty else [[0, 1, 2], [3, 4]]
        data = self.adapted_dataset

        def collate(items):
            if not items:
                return [torch.zeros(0, 8), *(torch.zeros(0, dtype=torch.int64) for _ in range(2))]
            x, *labels = zip(*items, strict=True)
            return [torch.stack(x), *map(torch.tensor, labels)]

        self.dataloader = DataLoader(data, batch_sampler=batches, collate_fn=collate)


def with_batches(empty, **options):
    model = made().model
    strategy = WithEmptyBatches(model=model, optimizer=Adam(model.parameters()), **options)
    strategy.empty = empty
    strategy.train(STREAM[0])
    return strategy


def test_empty_mini_batches_are_skipped():
    assert same_state(*(with_batches(empty).model.state_dict() for empty in (True, False)))


def test_a_strategy_is_copied_inside_an_epoch_of_a_loader_of_the_user():
    made = []
    with_batches(True, plugins=[Hears(after_update=lambda strategy: made.append(copy.deepcopy(strategy.dataloader)))])
    assert len(made[-1]) == 4
    assert len(list(made[-1])) == 2


def test_norms_without_running_statistics_warn_and_a_single_sample_is_refused():
    norm = nn.BatchNorm1d(16, track_running_stats=False)
    with pytest.warns(UserWarning, match="BatchNorm1d '1' of Sequential has track_running_stats=False"):
        strategy = made("amnesiac", net=lambda: nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 12)))
    strategy.train(STREAM[0])
    with pytest.raises(ValueError, match="one sample is alone in a mini-batch, by which BatchNorm1d"):
        strategy.predict(X[:1], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(net=lambda: nn.Sequential(nn.Linear(8, 16), nn.InstanceNorm1d(16)))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_networks_with_heads_of_their_own_are_refused(kind):
    with pytest.raises(ModelError, match="a head of its own for each task"):
        made(kind, net=lambda: as_multitask(SimpleMLP(2, input_size=8, hidden_size=16), "classifier"))


def test_a_task_that_arrives_later_has_a_label_of_its_own():
    strategy = made(isolation=Pools(slots=3))
    strategy.train(STREAM)
    with pytest.raises(TaskError, match=r"task_benchmark\(…, first_task=1\)"):
        strategy.train(task_benchmark((X, Y), (X, Y), task_classes=[[4, 5]]).train_stream)
    later = task_benchmark((X, Y), (X, Y), task_classes=[[4, 5]], first_task=2)
    strategy.train(later.train_stream)
    assert strategy.model.tasks == (0, 1, 2)
    strategy.eval(later.test_stream)
    assert set(strategy.predict(X[4:6], 2).tasks.tolist()) == {2}
    with pytest.raises(ValueError, match="first_task"):
        task_benchmark((X, Y), (X, Y), task_classes=[[4, 5]], first_task=-1)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_heads_have_the_type_of_the_features_behind_a_base_in_half_precision(kind):
    base = nn.Parameter(torch.randn(8, 8).to(torch.bfloat16), requires_grad=False)
    net = partial(Net, lambda s, x: s.layer(torch.relu(x @ s.base.to(x.dtype))), base=base, layer=nn.Linear(8, 12))
    strategy = made(kind, net=net)
    strategy.train(STREAM)
    assert strategy.model.head(0).weight.dtype == torch.float32
    assert strategy.unlearn([1]).tasks == (1,)


@pytest.mark.parametrize("kind", ["wsn", "pools"])
def test_the_width_of_features_is_found_by_running_the_backbone(kind):
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 12))
    strategy = made(kind, net=lambda: backbone)
    assert strategy.model.n_features == 12
    images = X[:, :, None, None].expand(60, 8, 3, 3).reshape(60, 1, 9, 8)
    strategy.train(task_benchmark((images, Y), (images, Y), task_classes=[[0, 1]]).train_stream)


def test_attributes_of_a_model_raise_no_other_error_than_attribute_errors():
    strategy = made("amnesiac")
    strategy.train(STREAM[0])
    members = dict(inspect.getmembers(strategy.model))
    assert members["current_task"] is None
    assert "gate" not in members  # there is one only in training


def test_copies_of_forgotten_samples_are_named():
    x = X.clone()
    x[20] = x[6] = x[0]
    strategy = made()
    strategy.train(task_benchmark((x, Y % 2), (X, Y % 2), task_classes=[[0, 1]]).train_stream)
    with pytest.warns(UserWarning, match=r"copies of the requested samples remain in task 0, at \[20\]"):
        strategy.unlearn(task=0, samples=[0, 6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(strategy.unlearn(task=0, samples=[1, 20]).plan.samples) == 2


def test_documents_that_name_a_key_twice_are_refused():
    strategy = made()
    strategy.train(STREAM)
    text = strategy.unlearn([1]).to_json()
    UnlearningRecord.from_json(text)
    doubled = text.replace('"claim":', '"claim": "approximate", "claim":', 1)
    with pytest.raises(RecordError, match="it names 'claim' twice"):
        UnlearningRecord.from_json(doubled)


def test_no_text_in_a_csv_is_a_formula():
    assert csv_text([["=1+1", "@x", "a-b", -1.5, None]]) == "'=1+1,'@x,a-b,-1.5,\n"


@pytest.mark.parametrize("lr", ["0.01", None, True, 1e400])
def test_a_state_gives_an_optimizer_no_other_kind_of_option(lr, tmp_path):
    strategy = made()
    strategy.train(STREAM[0])
    body, parts = read_state(strategy.save(tmp_path / "state"))
    body["optimizer"]["state"]["param_groups"][0]["lr"] = lr if lr != 1e400 else {"$float": "inf"}
    write_state(tmp_path / "state", body, parts)
    fresh = made()
    with pytest.raises(StateError, match=r"optimizer\.lr"):
        load_state(fresh, tmp_path / "state")
    assert fresh.optimizer.param_groups[0]["lr"] == 1e-2
    fresh.train(STREAM[0])  # refused before anything changed, so that it is of use


@pytest.mark.parametrize("event", ["after_train_dataset_adaptation", "after_eval_dataset_adaptation"])
def test_a_strategy_is_saved_after_an_interruption_at_the_adaptation_of_data(event, tmp_path):
    class Interrupts(SupervisedPlugin):
        pass

    def interrupt(plugin, strategy, **kwargs):
        raise KeyboardInterrupt

    strategy, loaded, alone = (made(plugins=[Interrupts()]) for _ in range(3))
    for each in (strategy, alone):
        each.train(STREAM[0])
    setattr(Interrupts, event, interrupt)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(STREAM[1]) if "train" in event else strategy.eval(STREAM[:1])
    delattr(Interrupts, event)
    load_state(loaded, strategy.save(tmp_path / "state"))
    for each in (loaded, alone):
        each.train(STREAM[1])
    assert same_state(loaded.model.state_dict(), alone.model.state_dict())


THREE = tiny.tasks(((0, 1), (2, 3), (4, 5)), (X, Y))


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_replay_memory_and_other_settings_before_an_aborted_training_are_no_exact_claim():
    assert learn(made(plugins=[DarkReplayPlugin()]), STREAM).plan_unlearning([0]).claim == "approximate"
    strategy = made()
    for strategy.train_epochs, experience in zip((1, 2, 1), THREE.train_stream, strict=True):
        strategy.train(experience)
    strategy.unlearn([1])
    loss, strategy._criterion = strategy._criterion, interrupt
    with pytest.raises(KeyboardInterrupt):
        strategy.train(THREE.train_stream[1])
    strategy._criterion = loss
    strategy.abort_training()
    assert strategy.plan_unlearning([2]).claim == "conditional"


def test_own_networks_save_all_buffers_and_a_merge_is_whole_or_undone(tmp_path):
    def counting():
        net = Net(lambda net, x: torch.relu(net.e(x)) + net.seen.add_(net.training), e=nn.Linear(8, 6), features=6)
        net.register_buffer("seen", torch.zeros(()), persistent=False)
        return net

    strategy, loaded = (make(CLPUDERpp, net=counting, merge_steps=3, train_mb_size=10) for _ in range(2))
    load_state(loaded, learn(strategy, THREE).save(tmp_path / "state"))
    assert all(torch.equal(each.model.network(1).seen, torch.tensor(4.0)) for each in (strategy, loaded))
    loaded.mark_permanent([0])  # the first is taken over
    before, loss, loaded._networks.loss = copy.deepcopy(loaded.model.state_dict()), loaded._networks.loss, interrupt
    with pytest.raises(KeyboardInterrupt):
        loaded.mark_permanent([1])
    assert same_state(loaded.model.state_dict(), before)
    loaded._networks.loss = loss
    loaded.mark_permanent([1])
    assert (loaded.model.main_tasks, loaded.unlearn([2], strict=True).remaining) == ((0, 1), (0, 1))


def test_nothing_of_a_task_stays_in_the_optimizer_or_after_an_interrupted_request():
    net = partial(Net, lambda net, x: torch.relu(x @ net.w), w=nn.Parameter(torch.eye(8, 6)), features=6)
    strategy = made(net=net, plugins=[Hears(after_unlearning=lambda strategy: stop and stop.pop()())])
    stop, asked = [], with_unlearning(THREE, {1: [1], 2: [2]})
    strategy.train(asked.train_stream[:2])
    known = {*map(id, strategy.model.parameters())}
    assert all(id(p) in known for group in strategy.optimizer.param_groups for p in group["params"])
    stop = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        strategy.train(asked.train_stream[2])
    strategy.unlearn([2])
    assert (strategy.experience, strategy.mbatch, strategy.dataloader, strategy.loss.grad_fn) == (None, None, [], None)


def test_a_task_with_a_request_in_its_middle_can_be_trained_again_without_samples():
    asked = with_unlearning(THREE, [UnlearningRequest(tasks=[0], at=2, when="iteration", iteration=1)])
    assert learn(made(), asked).unlearn(task=2, samples=[0]).claim == "exact"
