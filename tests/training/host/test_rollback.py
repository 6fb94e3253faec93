"""A snapshot restores plugins of the user by their own methods, and neither enters nor changes other objects."""

import pytest
from avalanche.core import SupervisedPlugin
from support.fault_injection import FailsAtEvent
from support.strategies import DIGITS, brief, learn

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.training import load_state, save_state
from avalanche_amnesia.training.host import saving
from avalanche_amnesia.unlearning.purging import purgers


class Seen(SupervisedPlugin):
    """Keeps the labels of all tasks, in a dict that it changes in place."""

    def __init__(self):
        super().__init__()
        self.tasks = {}

    def after_training_iteration(self, strategy, **kwargs):
        self.tasks[strategy.experience.task_label] = [1]


class Saved(Seen):
    def state(self):
        return {"tasks": self.tasks}

    def load_state(self, state):
        self.tasks = state["tasks"]


@pytest.mark.parametrize("event", ["after_training_exp", "after_training_epoch"])
def test_a_plugin_with_a_state_method_loses_an_aborted_task_and_any_other_keeps_it(event):
    saved, other = Saved(), Seen()
    late = FailsAtEvent(event, KeyboardInterrupt, when=lambda s: s.experience.task_label == 1)
    strategy = learn(brief(plugins=[saved, other, late]), DIGITS.train_stream[:1])
    tasks = other.tasks
    with pytest.raises(KeyboardInterrupt):
        strategy.train(DIGITS.train_stream[1])
    strategy.abort_training()
    strategy.abort_training()
    assert saved.tasks == {0: [1]}
    assert other.tasks is tasks
    assert tasks == {0: [1], 1: [1]}


def test_an_aborted_training_does_not_bring_back_a_task_that_was_unlearned_meanwhile(monkeypatch):
    def purge(plugin, context, change):
        change.set(plugin, tasks={task: held for task, held in plugin.tasks.items() if task not in context.tasks})
        return "Saved: cleaned"

    monkeypatch.setitem(purgers._PURGERS, Saved, purge)
    stream = with_unlearning(DIGITS, [UnlearningRequest((0,), 1, "iteration", 1)]).train_stream
    late = FailsAtEvent("after_training_exp", KeyboardInterrupt, when=lambda s: s.experience.task_label == 1)
    strategy = learn(brief(plugins=[saved := Saved(), late]), stream[:1])
    with pytest.raises(KeyboardInterrupt):
        strategy.train(stream[1])
    strategy.abort_training()
    assert 0 not in saved.tasks


def test_a_failed_load_restores_a_plugin_by_its_state_methods(tmp_path, monkeypatch):
    state = save_state(learn(brief(plugins=[Saved()]), DIGITS.train_stream[:1]), tmp_path / "state")

    def fails(*given):
        raise OSError("disk")

    strategy = brief(plugins=[saved := Saved()])
    with monkeypatch.context() as patch:
        patch.setattr(saving, "trigger_plugins", fails)
        with pytest.raises(StateError):
            load_state(strategy, state)
    assert saved.tasks == {}
    load_state(strategy, state)
    assert saved.tasks == {0: [1]}
