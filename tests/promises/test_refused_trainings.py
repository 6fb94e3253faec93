"""Refused trainings and typical mistakes change nothing, and errors name a remedy."""

import warnings

import pytest
import torch
from avalanche.benchmarks import nc_benchmark, task_incremental_benchmark
from avalanche.training import Cumulative, JointTraining
from support.strategies import DIGITS, amnesiac, learn, make, mlp, stock, trained
from support.strategy_state import bits, frozen, unchanged, unlearning_plugin
from torch.optim import SGD
from torch.utils.data import TensorDataset

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models import MultiHeadModel
from avalanche_amnesia.training import HAT
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

STREAM = with_unlearning(DIGITS, [UnlearningRequest((0,), 1, "before")]).train_stream


def without_masks():
    return stock(model=MultiHeadModel(mlp()), epochs=1, optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9))


def masked():
    return amnesiac(compensation="none", train_epochs=1, optimizer="momentum")


def refusing(plugin):
    """A fault that consists in one plugin too many."""

    def spoil(strategy):
        added = plugin()
        strategy.plugins.insert(strategy.plugins.index(unlearning_plugin(strategy)), added)
        return lambda: strategy.plugins.remove(added)

    return spoil


def missing(kind, plugin):
    """A fault that consists in a plugin that another one needs."""

    def spoil(strategy):
        needed = find_plugin(strategy, kind)
        position = strategy.plugins.index(needed)
        strategy.plugins[position] = plugin()
        return lambda: strategy.plugins.insert(position, needed)

    return spoil


def swapped(strategy):
    recorder = find_plugin(strategy, TrajectoryPlugin)
    strategy.plugins.remove(recorder)
    strategy.plugins.insert(0, recorder)

    def repair():
        strategy.plugins.remove(recorder)
        strategy.plugins.insert(strategy.plugins.index(find_plugin(strategy, HATPlugin)) + 1, recorder)

    return repair


def two_ledgers(strategy):
    added = UnlearningPlugin()
    strategy.plugins.append(added)
    return lambda: strategy.plugins.remove(added)


FAULTS = {
    "heads without masks": (without_masks, refusing(CounterfactualPlugin), TypeError, "need a model with masks"),
    "heads without a trajectory": (masked, missing(TrajectoryPlugin, CounterfactualPlugin), ValueError, "needs Traj"),
    "shadows without masks": (without_masks, refusing(BackupPlugin), TypeError, "shadow copies need a MaskedModel"),
    "shadows without a trajectory": (masked, missing(TrajectoryPlugin, BackupPlugin), ValueError, "needs HATPlugin"),
    "two trajectories": (masked, refusing(TrajectoryPlugin), ValueError, "has 2 TrajectoryPlugins"),
    "two ledgers": (masked, two_ledgers, ValueError, "has 2 UnlearningPlugins"),
    "recorded before committed": (masked, swapped, ValueError, "put HATPlugin in front of TrajectoryPlugin"),
}


def state(strategy):
    optimizer = strategy.optimizer
    sizes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    return bits(strategy.model), sizes, frozen(optimizer.state_dict()), unlearning_plugin(strategy).ledger.state_dict()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_training_changes_nothing_and_runs_once_the_fault_is_gone(fault):
    make, spoil, error, message = FAULTS[fault]
    strategy = make()
    first, second = STREAM[:2]
    strategy.train(first)
    before = state(strategy)
    repair = spoil(strategy)
    for _ in range(2):  # the second time as the first
        with pytest.raises(error, match=message):
            strategy.train(second)
        assert state(strategy) == before
    repair()
    strategy.train(second)
    assert unlearning_plugin(strategy).ledger.remaining == (1,)
    assert strategy.model.tasks == (1,)
    assert state(strategy)[0] != before[0]


def test_tasks_loaded_with_a_checkpoint_make_no_claim_exact():
    """The checkpoint may be that of a model which unlearned something approximately."""
    before = trained(2, train_epochs=1)
    before.unlearn([0])
    strategy = amnesiac(train_epochs=1)
    strategy.model.load_state_dict(before.model.state_dict())
    with pytest.raises(RequestError, match="task 1 can't be unlearned: the model came with it"):
        strategy.plan_unlearning([1])
    with pytest.raises(RequestError, match="task 3 can't be unlearned: it is not yet trained"):
        strategy.plan_unlearning([3])
    loaded = bits(strategy.model)
    strategy.train(DIGITS.train_stream[2])
    assert strategy.unlearn([2]).claim == "approximate"
    assert bits(strategy.model) == loaded


def test_an_unlearning_plugin_that_is_not_the_strategys_own_is_refused():
    strategy = learn(stock(epochs=1), DIGITS.train_stream[:1])
    with unchanged(lambda: bits(strategy.model)), pytest.raises(RequestError, match="none of Naive's plugins"):
        UnlearningPlugin().unlearn(strategy, [0])
    assert unlearning_plugin(strategy).unlearn(strategy, [0]).tasks == (0,)


def test_logs_of_another_run_are_not_continued(tmp_path):
    trained(1, train_epochs=1, trajectory=TrajectoryPlugin(path=tmp_path))
    strategy = amnesiac(train_epochs=1, trajectory=TrajectoryPlugin(path=tmp_path))
    before = bits(strategy.model)
    for task in (0, 1):
        with pytest.raises(RequestError, match=r"holds updates of tasks \[0\], which another strategy trained"):
            strategy.train(DIGITS.train_stream[task])
    assert bits(strategy.model) == before


@pytest.mark.parametrize("declined", [False, True])
def test_requests_without_an_unlearning_plugin_are_warned_of(declined):
    plugins = [TrajectoryPlugin(), UnlearningPlugin(obey=False)] if declined else []
    strategy = make(HAT, hidden=(12,), features=10, plugins=plugins, train_epochs=1)
    first, second, *_ = with_unlearning(DIGITS, {1: [0]}).train_stream
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        strategy.train(first)
        assert not [w for w in said if "obeys no request" in str(w.message)]
        strategy.train(second)
    told = [str(w.message) for w in said if "obeys no request" in str(w.message)]
    assert len(told) == (0 if declined else 1)
    assert all("UnlearningPlugin()" in text and "at task 1" in text for text in told)


def class_incremental():
    """As the host makes it: every experience has the task label 0."""
    sets = []
    for stream in (DIGITS.train_stream, DIGITS.test_stream):
        x = torch.cat([experience.tensors[0] for experience in stream])
        y = torch.cat([experience.tensors[1] + 2 * task for task, experience in enumerate(stream)])
        data = TensorDataset(x, y)
        data.targets = y.tolist()
        sets.append(data)
    return nc_benchmark(*sets, 5, task_labels=False, seed=0)


@pytest.mark.parametrize(("make", "error"), [(amnesiac, TaskError), (stock, RequestError)], ids=["masks", "stock"])
def test_a_class_incremental_stream_is_refused_with_its_remedy(make, error):
    benchmark, strategy = class_incremental(), make()
    before = bits(strategy.model)
    message = r"5 experiences of this stream have that task label.*task_incremental_benchmark\(b.*return_task_id=True"
    for ask in (strategy.train, strategy.eval) if make is amnesiac else (strategy.train,):
        with pytest.raises(TaskError, match=message):
            ask(benchmark.train_stream[0])
    assert bits(strategy.model) == before
    mended, strategy = task_incremental_benchmark(benchmark, reset_task_labels=True), make()
    learn(strategy, mended.train_stream[:2])
    assert unlearning_plugin(strategy).ledger.remaining == (0, 1)
    with pytest.raises(error, match="task 1 is already trained and remains: unlearn it first"):
        strategy.train(mended.train_stream[1])


def test_one_training_over_several_tasks_is_refused_as_such():
    strategy = stock(JointTraining, epochs=1)
    before = bits(strategy.model)
    with pytest.raises(TaskError, match=r"JointTraining trains tasks \[0, 1, 2\] in one training.*Train one task"):
        strategy.train(DIGITS.train_stream[:3])
    assert bits(strategy.model) == before
    assert unlearning_plugin(strategy).ledger.remaining == ()
    strategy.train(DIGITS.train_stream[:1])
    assert unlearning_plugin(strategy).ledger.remaining == (0,)
    memory = stock(Cumulative, epochs=1)
    for experience in DIGITS.train_stream[:3]:  # trains on earlier tasks again, which makes no new task
        memory.train(experience)
    assert unlearning_plugin(memory).ledger.remaining == (0, 1, 2)
