"""If an unlearning fails, nothing has changed, and the next request works."""

import copy

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.fault_injection import FailsAtEvent
from support.interruptions import Interrupted, first_and_last, interrupted_at, lines_of
from support.strategies import DIGITS, Hears, amnesiac, quiet, stock, trained
from support.strategy_state import bits, fingerprint, trajectory, unlearning_plugin

from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.unlearning.purging import purgers


class Kept(SupervisedPlugin):
    """Keeps a list that its purger empties."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.ones(3)]


def purge_kept(plugin, context, change):
    change.set(plugin, kept=[])
    return "kept: emptied"


def test_an_error_at_any_line_of_an_unlearning_changes_nothing(monkeypatch):
    monkeypatch.setitem(purgers._PURGERS, Kept, purge_kept)
    strategy = trained(3, evaluator=quiet, plugins=lambda: [Kept()], train_epochs=1, optimizer="momentum")
    kept, untouched = find_plugin(strategy, Kept), copy.deepcopy(strategy)
    again = copy.deepcopy(strategy)
    untouched.unlearn([0, 1])  # some lines run once in a process
    lines = lines_of(lambda: again.unlearn([0, 1]))
    before, places = fingerprint(strategy, kept.kept), first_and_last(lines)
    for number in places[:: len(places) // 40]:
        if number < len(lines) - 20:  # behind them the record is written, and the unlearning stands
            with pytest.raises(Interrupted), interrupted_at(number):
                strategy.unlearn([0, 1])
            assert fingerprint(strategy, kept.kept) == before, lines[number]
    record = strategy.unlearn([0, 1])
    assert unlearning_plugin(strategy).records == [record]
    assert kept.kept == []
    assert bits(strategy.model) == bits(untouched.model)
    strategy.train(DIGITS.train_stream[3])


@pytest.mark.parametrize(("make", "again"), [(amnesiac, False), (stock, False), (stock, True)])
def test_a_failure_between_the_trajectory_and_the_ledger_undoes_the_task(make, again):
    late = FailsAtEvent("after_training_exp", KeyboardInterrupt, when=lambda s: s.experience.task_label == 1)
    strategy = make(plugins=[late], **({"train_epochs": 1} if make is amnesiac else {"epochs": 1}))
    strategy.train(DIGITS.train_stream[0])
    before = bits(strategy.model)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(DIGITS.train_stream[1])
    assert trajectory(strategy).tasks == ((0,) if make is amnesiac else (0, 1))  # users' plugins come first there
    if again:
        strategy.plugins.remove(late)
        strategy.train(DIGITS.train_stream[1])
        assert unlearning_plugin(strategy).ledger.remaining == (0, 1)
        unlearning_plugin(strategy).unlearn(strategy, [1])
    else:
        getattr(strategy, "abort_training", lambda: unlearning_plugin(strategy).abort(strategy))()
    assert bits(strategy.model) == before
    assert trajectory(strategy).tasks == (0,) == unlearning_plugin(strategy).ledger.remaining


@pytest.mark.parametrize("event", ["before_unlearning", "after_unlearning"])
def test_a_request_inside_an_unlearning_is_refused_and_undoes_the_outer_one(event):
    asks = Hears(**{event: lambda strategy: strategy.unlearn([1])})
    strategy = trained(2, plugins=[asks], train_epochs=1)
    before = fingerprint(strategy)
    with pytest.raises(ValueError, match=r"tasks \[0\] are just being unlearned"):
        strategy.unlearn([0])
    assert fingerprint(strategy) == before
