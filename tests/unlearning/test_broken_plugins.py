"""A plugin that fails during an unlearning is named, with a way to continue without it."""

from operator import attrgetter

import pytest
from avalanche.core import SupervisedPlugin
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from support.fault_injection import raiser
from support.strategies import DIGITS, NoMetric, learn, stock, trained
from support.strategy_state import fingerprint, unlearning_plugin

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.unlearning import BrokenPluginError
from avalanche_amnesia.unlearning.purging import purgers


class Breaks:
    """Fails at one of the two events."""

    at = "after_unlearning"

    def before_unlearning(self, *args, **kwargs):
        self.fail("before_unlearning")

    def after_unlearning(self, *args, **kwargs):
        self.fail("after_unlearning")

    def fail(self, event):
        if event == self.at:
            raise ZeroDivisionError("by nothing")


class Listens(Breaks, SupervisedPlugin):
    pass


class Measures(Breaks, NoMetric):
    pass


class Logs(Breaks, BaseLogger):
    pass


KINDS = {"plugins": Listens, "evaluator.metrics": Measures, "evaluator.loggers": Logs}


def learned(place, broken, stream=DIGITS.train_stream):
    metrics = [broken] if place == "evaluator.metrics" else []
    evaluator = EvaluationPlugin(*metrics, loggers=[broken if place == "evaluator.loggers" else BaseLogger()])
    return trained(2, stream, train_epochs=1, evaluator=evaluator, plugins=[broken] if place == "plugins" else [])


@pytest.mark.parametrize(
    ("place", "event"), [*((place, "after_unlearning") for place in KINDS), ("plugins", "before_unlearning")]
)
def test_a_failing_plugin_is_named_and_without_it_the_request_is_obeyed(place, event):
    broken = KINDS[place]()
    broken.at = event
    strategy = learned(place, broken)
    before = fingerprint(strategy)
    kind = type(broken).__name__
    words = (
        rf"^{kind}\.{event} failed \(ZeroDivisionError: by nothing\)\. Nothing was changed, .*"
        rf"go on without it: take it out of strategy\.{place}$"
    )
    for _ in range(2):
        with pytest.raises(BrokenPluginError, match=words) as failed:
            strategy.unlearn([1])
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        assert fingerprint(strategy) == before
    attrgetter(place)(strategy).remove(broken)
    assert strategy.unlearn([1]).tasks == (1,)


def test_a_request_of_the_stream_waits_until_it_can_be_obeyed():
    stream = with_unlearning(DIGITS, [UnlearningRequest((0,), 1)]).train_stream
    strategy = learned("evaluator.metrics", broken := Measures(), stream[:1])
    with pytest.raises(BrokenPluginError, match=r"Measures\.after_unlearning failed"):
        strategy.train(stream[1])
    strategy.evaluator.metrics.remove(broken)
    strategy.train(stream[2])
    assert unlearning_plugin(strategy).ledger.remaining == (1, 2)


def test_a_plugin_whose_purger_fails_is_named(monkeypatch):
    class Keeps(SupervisedPlugin):
        pass

    keeps = Keeps()
    monkeypatch.setitem(purgers._PURGERS, Keeps, raiser(ZeroDivisionError))
    strategy = learn(stock(plugins=[keeps], epochs=1), DIGITS.train_stream[:1])
    before, unlearn = fingerprint(strategy), unlearning_plugin(strategy).unlearn
    words = (
        r"^the purger of Keeps failed \(ZeroDivisionError: injected\)\. Nothing was changed, .*Mend it and register it "
        r"again \(@register_purger\(Keeps\)\), or go on without it: take it out of strategy\.plugins$"
    )
    with pytest.raises(BrokenPluginError, match=words):
        unlearn(strategy, [0])
    assert fingerprint(strategy) == before
    strategy.plugins.remove(keeps)
    assert unlearn(strategy, [0]).tasks == (0,)
