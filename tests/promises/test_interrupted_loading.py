"""After an interrupted load the state is complete, or only another load works; a failed unlearning changes nothing."""

import copy
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import Naive
from support.fault_injection import FailsAtEvent
from support.interruptions import Interrupted, at_every_line, comparable_state, first_and_last, interrupted_at, lines_of
from support.strategies import DIGITS, Hears, amnesiac, brief, learn, quiet, stock, trained
from support.strategy_state import bits, fingerprint, trajectory, unlearning_plugin

from avalanche_amnesia.saving import StateError
from avalanche_amnesia.training import load_state, save_state
from avalanche_amnesia.training.host import saving
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.unlearning.purging import purgers

built = partial(brief, evaluator=quiet)


MAKERS = {"AmnesiacHAT": built, "stock": lambda: stock(Naive, epochs=1)}


def uses(strategy: Any, path: Any) -> dict[str, Any]:
    """Uses of a strategy, by name."""
    unlearning = find_plugin(strategy, UnlearningPlugin)
    return {
        "train": lambda: strategy.train(DIGITS.train_stream[1]),
        "eval": lambda: strategy.eval(DIGITS.test_stream[:1]),
        "plan": lambda: unlearning.plan(strategy, [0]),
        "unlearn": lambda: unlearning.unlearn(strategy, [0]),
        "save": lambda: save_state(strategy, path),
    }


def refuses(strategy: Any, path: Any) -> bool:
    """Return True if a strategy refuses all of its uses and writes nothing, False if it refuses none."""
    refused = set()
    for name, use in uses(strategy, path).items():
        with suppress(StateError):
            use()
            continue
        refused.add(name)
    assert refused in (set(), set(uses(strategy, path)))
    assert not refused or not path.exists()
    return bool(refused)


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture
def state(make, tmp_path):
    return save_state(learn(make(), DIGITS.train_stream[:1]), tmp_path / "state")


def marked(strategy: Any) -> bool:
    return type(strategy.plugins[0]).__name__ == "UnfinishedLoad"


@pytest.mark.filterwarnings("ignore")
def test_a_load_interrupted_at_any_line_is_refused_or_complete(tmp_path):
    """The state is looked at in front of every line, and the load interrupted at every fourth one.

    The stock strategy is tested at the lines that the other one's load does not run.
    """
    seen = set()
    for kind, make in MAKERS.items():
        state = save_state(learn(make(), DIGITS.train_stream[:1]), tmp_path / kind)
        strategy, untrained = make(), make()
        fresh = comparable_state(strategy)
        lines = lines_of(partial(load_state, strategy, state))
        whole, begun = comparable_state(strategy), False
        places = {line: place for place, line in reversed([*enumerate(lines)]) if line not in seen}
        strategy = copy.deepcopy(untrained)

        def look(*line, strategy=strategy, fresh=fresh, whole=whole):
            nonlocal begun
            begun |= marked(strategy)
            if line not in seen and not marked(strategy):
                assert comparable_state(strategy) == (whole if begun else fresh), line
            seen.add(line)

        with at_every_line(look):
            load_state(strategy, state)
        assert begun
        begun, strategy = False, copy.deepcopy(untrained)
        for number in sorted(places.values())[::4]:
            with suppress(Interrupted), interrupted_at(number):
                load_state(strategy, state)
            if not marked(strategy):
                assert comparable_state(strategy) == (whole if begun else fresh)
                continue
            begun = True
            found = comparable_state(strategy)
            del found["UnfinishedLoad"]
            assert found in (fresh, whole)
            with pytest.raises(StateError, match="did not finish: load that state again"):
                strategy.train(DIGITS.train_stream[1])
            if number % 4 == 0:
                load_state(strategy, state)
                assert comparable_state(strategy) == whole
            strategy = copy.deepcopy(untrained)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk")], ids=str)
def test_after_an_interrupted_load_every_use_is_refused_until_a_state_is_loaded(
    make, state, error, tmp_path, monkeypatch
):
    strategy = make()

    def fails(*args: Any) -> None:
        raise error

    monkeypatch.setattr(saving, "_load_optimizer", fails)
    with pytest.raises((KeyboardInterrupt, StateError)):
        load_state(strategy, state)
    monkeypatch.undo()
    assert refuses(strategy, tmp_path / "other")
    with pytest.raises(StateError, match="has no state"):  # a refused state makes nothing better
        load_state(strategy, tmp_path / "none")
    assert refuses(strategy, tmp_path / "other")
    load_state(strategy, state)
    assert not refuses(strategy, tmp_path / "other")


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
    with pytest.raises(ValueError, match=r"tasks \[0\] are being unlearned"):
        strategy.unlearn([0])
    assert fingerprint(strategy) == before
