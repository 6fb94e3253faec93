"""If an unlearning fails, nothing has changed, and the next request works."""

import copy
import functools

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.fault_injection import UNLEARNING_STEPS, FailsAtEvent, after_call, raiser
from support.strategies import DIGITS, Hears, amnesiac, quiet, stock, trained
from support.strategy_state import bits, fingerprint, trajectory, unchanged, unlearning_plugin

from avalanche_amnesia import UnlearningRequest, with_unlearning
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


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(purgers._PURGERS, Kept, purge_kept)


ERRORS = [RuntimeError, KeyboardInterrupt]


@functools.cache
def _momentum_strategy():
    return trained(3, evaluator=quiet, plugins=lambda: [Kept()], train_epochs=1, optimizer="momentum")


def momentum_strategy():
    return copy.deepcopy(_momentum_strategy())


@pytest.mark.parametrize("behind", [False, True], ids=["in front", "behind"])
@pytest.mark.parametrize(("owner", "name"), UNLEARNING_STEPS, ids=lambda v: getattr(v, "__name__", v))
def test_an_error_at_any_step_of_an_unlearning_changes_nothing(registered, monkeypatch, owner, name, behind):
    strategy = momentum_strategy()
    kept = find_plugin(strategy, Kept)
    for error in ERRORS:
        with unchanged(lambda: fingerprint(strategy, kept.kept)), monkeypatch.context() as patch:
            patch.setattr(owner, name, after_call(getattr(owner, name), error) if behind else raiser(error))
            with pytest.raises(error, match="injected"):
                strategy.unlearn([0, 1])
    record = strategy.unlearn([0, 1])
    assert unlearning_plugin(strategy).records == [record]
    assert kept.kept == []
    untouched = momentum_strategy()
    untouched.unlearn([0, 1])
    assert bits(strategy.model) == bits(untouched.model)
    strategy.train(DIGITS.train_stream[3])


def test_a_failed_unlearning_in_the_middle_of_a_task_changes_nothing_and_the_training_can_be_aborted():
    stream = with_unlearning(DIGITS, [UnlearningRequest((0,), 1, "iteration", 1)]).train_stream

    seen, fails = {}, FailsAtEvent("after_unlearning", KeyboardInterrupt)
    look = Hears(before_unlearning=lambda strategy: seen.update(fingerprint(strategy)))
    strategy = trained(1, stream, plugins=[look, fails], train_epochs=1)
    untouched = bits(strategy.model)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(stream[1])
    unlearning_plugin(strategy).current = None
    now = fingerprint(strategy)
    assert dict(now)["model"] == seen["model"]
    for part in ("before", "ledger", "logs", "records", "tainted", "groups", "state", "optimized"):
        assert dict(now)[part] == seen[part], part
    strategy.abort_training()
    assert bits(strategy.model) == untouched
    fails.event = ""
    assert strategy.unlearn([0]).tasks == (0,)


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
