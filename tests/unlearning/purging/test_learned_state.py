"""Learned state without a purger is found and refused, or left on request; users can register purgers."""

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import EWC, Naive
from avalanche.training.plugins import LRSchedulerPlugin
from avalanche.training.utils import ParamData
from support.strategies import DIGITS, amnesiac, learn, stock
from support.strategy_state import fingerprint, unlearning_plugin
from torch import nn

from avalanche_amnesia import UnlearningPlugin, register_purger
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
