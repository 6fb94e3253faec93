"""Learned state without a purger is found and refused, or left on request; users can register purgers."""

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import EWC, Naive
from avalanche.training.plugins import LRSchedulerPlugin
from support.strategies import DIGITS, learn, stock
from support.strategy_state import fingerprint, unlearning_plugin
from torch import nn

from avalanche_amnesia import UnlearningPlugin, register_purger
from avalanche_amnesia.unlearning.purging import UnknownStateError, learned_state, purgers


class Holds(SupervisedPlugin):
    """Keeps a tensor where a shallow look would not find it."""

    def __init__(self, hide):
        super().__init__()
        self.kept = hide(torch.ones(1))


class Attribute:
    def __init__(self, tensor):
        self.tensor = tensor


HIDES = {
    "containers": (lambda t: {"a": [{"b": (t,)}]}, "kept['a'][0]['b'][0]"),
    "an object": (lambda t: [Attribute({1: t})], "kept[0].tensor[1]"),
    "a closure": (lambda t: lambda: t, "kept.<closure>.t"),
    "a buffer": (lambda t: nn.BatchNorm1d(2, affine=False), "kept.running_mean"),
    "an array": (lambda t: t.numpy(), "kept"),
}


@pytest.mark.parametrize("hide", HIDES)
def test_unknown_learned_state_is_refused_before_anything_changes(hide):
    holds, path = HIDES[hide]
    strategy = learn(stock(EWC, ewc_lambda=1.0, plugins=[Holds(holds)], epochs=1), DIGITS.train_stream[:1])
    before = fingerprint(strategy)
    assert unlearning_plugin(strategy).plan(strategy, [0]).unpurged == ("Holds",)
    with pytest.raises(UnknownStateError) as caught:
        unlearning_plugin(strategy).unlearn(strategy, [0])
    for part in (f"Holds (in its {path})", "@register_purger(Holds)", "allow_unknown=True"):
        assert part in str(caught.value)
    assert fingerprint(strategy) == before
    record = unlearning_plugin(strategy).unlearn(strategy, [0], allow_unknown=True)
    assert record.plan.unpurged == ("Holds",)
    assert record.plan.purges == ("EWCPlugin",)


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
    with pytest.raises(UnknownStateError, match=r"Remembers \(in its memory\[0\]\)"):
        unlearning_plugin(strategy).unlearn(strategy, [0])


def test_state_in_slots_and_in_a_subclass_of_a_container_is_found():
    class Slotted:
        __slots__ = ("kept",)

        def __init__(self):
            self.kept = torch.ones(1)

    class Listed(list):
        pass

    assert learned_state(Slotted()) == "kept"
    assert learned_state(Listed([torch.ones(1)])) == "[0]"
    assert learned_state(Listed([torch.ones(0), 1, "two"])) is None


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

    class Mine(SupervisedPlugin):
        def __init__(self):
            super().__init__()
            self.kept = torch.ones(2)

    class Subclass(Mine):
        pass

    @register_purger(Mine)
    def clean(plugin, context, undo):
        seen.append((type(plugin).__name__, context))
        return "Mine: cleaned"

    strategy = learn(stock(plugins=[Subclass()], epochs=1), DIGITS.train_stream[:3])
    record = unlearning_plugin(strategy).unlearn(strategy, [1])
    ((name, context),) = seen
    assert name == "Subclass"
    assert (context.tasks, context.order) == ((1,), (0, 1, 2))
    assert {t: context.counters[t] for t in (0, 1, 2)} == {0: 0, 1: 1, 2: 2}
    assert context.own_parameters == {"heads.1.weight", "heads.1.bias"}
    assert "Mine: cleaned" in record.purged
    assert record.plan.purges == ("Subclass",)
    assert record.plan.unpurged == ()
    assert record.plan.affected == (0, 2)  # without masks every task uses every entry
