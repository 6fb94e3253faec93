"""Learned state without a purger is refused, or left on request; purgers of users, and plugins that fail, are named."""

from operator import attrgetter

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.logging import BaseLogger
from avalanche.training import EWC, Naive
from avalanche.training.plugins import EvaluationPlugin, LRSchedulerPlugin
from avalanche.training.utils import ParamData
from support.fault_injection import raiser
from support.strategies import DIGITS, NoMetric, amnesiac, learn, stock, trained
from support.strategy_state import fingerprint, unlearning_plugin
from torch import nn

from avalanche_amnesia import UnlearningPlugin, register_purger
from avalanche_amnesia.unlearning import BrokenPluginError
from avalanche_amnesia.unlearning.purging import UnknownStateError, learned_state, purgers


class Holds(SupervisedPlugin):
    """Keeps a tensor in some form."""

    def __init__(self, form):
        super().__init__()
        self.kept = form(torch.ones(1))


FORMS = {
    "containers": lambda t: {"a": [{"b": (t,)}]},
    "an object of Avalanche": lambda t: [ParamData("kept", init_tensor=t)],
    "a module": lambda t: nn.BatchNorm1d(2, affine=False),
    "an array": lambda t: t.numpy(),
    "a task's data": lambda t: DIGITS.train_stream[0],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_unknown_learned_state_is_refused_before_anything_changes(form):
    strategy = learn(stock(EWC, ewc_lambda=1.0, plugins=[Holds(form)], epochs=1), DIGITS.train_stream[:1])
    before = fingerprint(strategy)
    assert unlearning_plugin(strategy).plan(strategy, [0]).unpurged == ("Holds",)
    with pytest.raises(UnknownStateError) as caught:
        unlearning_plugin(strategy).unlearn(strategy, [0])
    for part in ("Holds (in its kept)", "@register_purger(Holds)", "allow_unknown=True"):
        assert part in str(caught.value)
    assert fingerprint(strategy) == before
    record = unlearning_plugin(strategy).unlearn(strategy, [0], allow_unknown=True)
    assert record.plan.unpurged == ("Holds",)
    assert record.plan.purges == ("EWCPlugin",)


class Entered:
    """An object that no search may enter."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattribute__(self, name):
        if name in ("tensor", "__dict__"):
            raise AssertionError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("hide", [Entered, lambda t: lambda: t], ids=["an object", "a closure"])
def test_objects_of_the_user_are_not_entered_and_their_plugin_is_named(hide):
    strategy = learn(amnesiac(plugins=[Holds(hide)], train_epochs=1), DIGITS.train_stream[:2])
    record = strategy.unlearn([1])
    assert (record.plan.unpurged, record.claim) == ((), "conditional")
    assert record.rests_on == (f"{__name__}.Holds",)


def test_a_plugin_with_its_own_state_method_has_the_state_that_it_returns():
    class States(Holds):
        def state(self):
            return {"means": self.means}

        def load_state(self, state):
            self.means = state["means"]

    plugin = States(lambda t: t)
    plugin.means = {}
    assert learned_state(plugin) is None
    plugin.means[0] = torch.ones(1)
    assert learned_state(plugin) == "state()"


def test_a_strategy_with_a_memory_of_its_own_is_refused_too():
    class Remembers(Naive):
        def __init__(self, **options):
            super().__init__(**options)
            self.memory = []

        def _after_training_exp(self, **kwargs):
            super()._after_training_exp(**kwargs)
            self.memory.append(self.experience.dataset)

    strategy = stock(Remembers, unlearning=UnlearningPlugin(), epochs=1)
    assert unlearning_plugin(strategy).plan  # nothing is kept before the first training
    strategy.train(DIGITS.train_stream[0])
    with pytest.raises(UnknownStateError, match=r"Remembers \(in its memory\)"):
        unlearning_plugin(strategy).unlearn(strategy, [0])


def test_a_reference_to_the_strategy_is_no_learned_state():
    class Refers(SupervisedPlugin):
        def before_training(self, strategy, **kwargs):
            self.all = {"strategy": strategy, "model": strategy.model, "step": strategy.optimizer.step}
            self.weights = list(strategy.model.parameters())
            self.numbers = [1, 2, "three"]

    strategy = stock(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), plugins=[Refers()], epochs=1
    )
    strategy.plugins.append(LRSchedulerPlugin(torch.optim.lr_scheduler.StepLR(strategy.optimizer, 1)))
    strategy.train(DIGITS.train_stream[0])
    assert unlearning_plugin(strategy).unlearn(strategy, [0]).plan.unpurged == ()


def test_a_registered_purger_is_called_for_its_class_and_subclasses(monkeypatch):
    monkeypatch.setattr(purgers, "_PURGERS", dict(purgers._PURGERS))
    seen = []

    class Subclass(Holds):
        pass

    @register_purger(Holds)
    def clean(plugin, context, undo):
        seen.append((type(plugin).__name__, context))
        return "Holds: cleaned"

    strategy = learn(stock(plugins=[Subclass(lambda t: t)], epochs=1), DIGITS.train_stream[:3])
    record = unlearning_plugin(strategy).unlearn(strategy, [1])
    ((name, context),) = seen
    assert name == "Subclass"
    assert (context.tasks, context.order) == ((1,), (0, 1, 2))
    assert {t: context.counters[t] for t in (0, 1, 2)} == {0: 0, 1: 1, 2: 2}
    assert context.own_parameters == {"heads.1.weight", "heads.1.bias"}
    assert "Holds: cleaned" in record.purged
    assert record.plan.purges == ("Subclass",)
    assert record.plan.unpurged == ()
    assert record.plan.affected == (0, 2)  # without masks every task uses every entry


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
