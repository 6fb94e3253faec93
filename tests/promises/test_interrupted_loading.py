"""After an interrupted load the state is complete, or the strategy refuses everything except another load."""

import copy
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from avalanche.training import Naive
from support.interruptions import Interrupted, at_every_line, comparable_state, interrupted_at, lines_of
from support.strategies import DIGITS, brief, learn, quiet, stock

from avalanche_amnesia.saving import StateError
from avalanche_amnesia.training import load_state, save_state
from avalanche_amnesia.training.host import saving
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

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
    strategy = learn(make(), DIGITS.train_stream[:1])
    return save_state(strategy, tmp_path / "state")


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
    with pytest.raises(StateError, match="holds no state"):  # a refused state makes nothing better
        load_state(strategy, tmp_path / "none")
    assert refuses(strategy, tmp_path / "other")
    load_state(strategy, state)
    assert not refuses(strategy, tmp_path / "other")
