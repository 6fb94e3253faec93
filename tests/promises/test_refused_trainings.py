"""A training that a plugin refuses changes nothing, and runs after the fault is repaired."""

import pytest
from support.strategies import DIGITS, amnesiac, mlp, stock
from support.strategy_state import bits, frozen, unlearning_plugin
from torch.optim import SGD

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.models import MultiHeadModel
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import (
    CounterfactualPlugin,
    HATPlugin,
    TrajectoryPlugin,
    UnlearningPlugin,
)

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
