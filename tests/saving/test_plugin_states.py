"""State of user plugins: saved from plain attributes, by ``state()``, by a conversion, or refused by name."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.strategies import DIGITS, amnesiac, learn, quiet
from torch import nn

from avalanche_amnesia.saving import StateError
from avalanche_amnesia.training import load_state, save_state
from avalanche_amnesia.training.host.states import Conversion, register_state


class Counting(SupervisedPlugin):
    """Plain values of its own, and settings."""

    def __init__(self, rate: float = 0.5, schedule: Any = max) -> None:
        super().__init__()
        self.rate, self.schedule = rate, schedule
        self.steps, self.seen, self.mean = 0, defaultdict(int), torch.zeros(2)

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.steps += 1
        self.seen[strategy.clock.train_exp_counter] += 1
        self.mean = self.mean.lerp(torch.ones(2), self.rate)


def strategy_of(*plugins: Any) -> Any:
    return amnesiac(train_epochs=1, plugins=list(plugins), evaluator=quiet())


def saved(tmp_path, *plugins: Any) -> Any:
    strategy = learn(strategy_of(*plugins), DIGITS.train_stream[:1])
    return save_state(strategy, tmp_path / "state")


def test_plain_attributes_are_saved_with_their_types(tmp_path):
    trained, loaded = Counting(), Counting()
    state = saved(tmp_path, trained)
    load_state(strategy_of(loaded), state)
    assert loaded.steps == trained.steps > 0
    assert loaded.seen == trained.seen
    assert loaded.seen.default_factory is int
    assert torch.equal(loaded.mean, trained.mean)


def test_loading_into_a_plugin_with_other_settings_is_refused(tmp_path):
    state = saved(tmp_path, Counting())
    for other, text in (
        ({"rate": 0.2}, r"Counting.rate=0.5 \(here 0.2\)"),
        ({"schedule": min}, r"schedule='max' \(here 'min'\)"),
    ):
        with pytest.raises(StateError, match=text):
            load_state(strategy_of(Counting(**other)), state)


class Keeping(SupervisedPlugin):
    """Attributes that no state can hold."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.kept, self.more = {1: [thing]}, thing


def test_attributes_that_no_state_can_hold_are_named_before_anything_is_written(tmp_path):
    things = {"Linear": nn.Linear(1, 1), "function": lambda: 1, "list_iterator": iter([1]), "object": object()}
    for kind, thing in things.items():
        text = rf"Keeping\.kept\[1\]\[0\] is a {kind}, Keeping\.more is a {kind}.*Give Keeping a state\(\)"
        with pytest.raises(StateError, match=text):
            saved(tmp_path, Keeping(thing))
        assert not (tmp_path / "state").exists()


class Teaching(SupervisedPlugin):
    """A module of its own, which it saves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher: nn.Module | None = None

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self.teacher = nn.Linear(2, 2)

    def state(self) -> Any:
        return None if self.teacher is None else dict(self.teacher.state_dict())

    def load_state(self, state: Any) -> None:
        if state is not None:
            self.teacher = nn.Linear(2, 2)
            self.teacher.load_state_dict(state)


def test_a_plugin_saves_itself_by_its_own_state_method(tmp_path):
    trained, loaded = Teaching(), Teaching()
    load_state(strategy_of(loaded), saved(tmp_path, trained))
    assert torch.equal(loaded.teacher.weight, trained.teacher.weight)


@pytest.mark.filterwarnings("error:.*incompatible callbacks")
def test_after_loading_is_called_once_the_whole_state_is_loaded(tmp_path):
    class Looking(SupervisedPlugin):
        def after_loading(self, strategy: Any) -> None:
            self.tasks = strategy.model.tasks

    plugin = Looking()
    load_state(strategy_of(plugin), saved(tmp_path, Looking()))
    assert plugin.tasks == (0,)


def test_values_returned_by_a_state_method_are_checked(tmp_path):
    class Wrong(Teaching):
        def state(self) -> Any:
            return {"teacher": self}

    with pytest.raises(StateError, match=r"Wrong\.state\(\)\.teacher is a Wrong"):
        saved(tmp_path, Wrong())


class Foreign(SupervisedPlugin):
    """A plugin from another library."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.loader = nn.Linear(1, 1), iter([1])


def test_a_plugin_of_another_library_is_saved_by_registered_conversions(tmp_path):
    def give(state: Any, held: Any, strategy: Any) -> Any:
        new = nn.Linear(1, 1)
        new.load_state_dict(state)
        return new

    register_state(Foreign, memory=Conversion(lambda memory: dict(memory.state_dict()), give), loader=None)
    trained, loaded = Foreign(), Foreign()
    loader = loaded.loader
    load_state(strategy_of(loaded), saved(tmp_path, trained))
    assert torch.equal(loaded.memory.weight, trained.memory.weight)
    assert loaded.loader is loader
