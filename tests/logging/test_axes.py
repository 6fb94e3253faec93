"""Axes of the metrics and the counters in the rows, callback by callback."""

import importlib
from collections.abc import Sequence
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import pytest
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.training.plugins import EvaluationPlugin
from support.fault_injection import FailsAtEvent
from support.strategies import DIGITS, amnesiac
from support.wandb_files import Recorder

from avalanche_amnesia import evaluation, with_unlearning
from avalanche_amnesia.contrib import metrics as contrib_metrics
from avalanche_amnesia.logging.axes import axis_of
from avalanche_amnesia.logging.names import EVENT


@pytest.mark.parametrize(
    ("name", "callback", "axis"),
    [
        ("Loss_Epoch/train_phase/train_stream/Task000", "after_training_epoch", "iteration"),
        ("Loss_Epoch/train_phase/train_stream/Task000", None, "iteration"),
        ("Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000", "after_eval_exp", "task"),
        ("Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000", None, "task"),
        ("Mystery", "after_eval", "task"),
        ("Mystery", "after_training", "iteration"),
        ("Mystery", None, "iteration"),
        ("Mystery", "before_unlearning", "event"),
        ("Top1_Acc_Exp/eval_phase/test_stream", "after_unlearning", "event"),
        ("JSD_Exp/eval_phase/test_stream/Exp000", "after_eval_exp", "task"),
        ("AccuracyDifference_Exp/eval_phase/test_stream/Exp000", "after_eval_exp", "task"),
        ("Capacity/train_phase/layer0", "after_training_exp", "iteration"),
        ("Unlearning/seconds", "after_unlearning", "event"),
    ],
)
def test_axis_of(name: str, callback: str | None, axis: str) -> None:
    assert axis_of(name, callback) == axis


class OwnAxis:
    """A metric that knows what it is drawn over."""

    def __init__(self, axis: str) -> None:
        self.axis = axis


@pytest.mark.parametrize("axis", ["iteration", "task", "event"])
@pytest.mark.parametrize("callback", [None, "after_eval", "after_training_exp", "after_unlearning"])
def test_a_metric_knows_its_axis(axis: str, callback: str | None) -> None:
    assert axis_of("Mystery/eval_phase/test_stream", callback, OwnAxis(axis)) == axis


def test_an_axis_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(ValueError, match=r"OwnAxis.axis='epoch' is unknown; allowed are iteration, task, event"):
        axis_of("Mystery", None, OwnAxis("epoch"))


def test_the_metrics_of_unlearning_go_over_events() -> None:
    places = [
        (room.__name__, file.name) for room in (evaluation, contrib_metrics) for file in iter_modules(room.__path__)
    ]
    files = [importlib.import_module(f"{room}.{file}") for room, file in places]
    metrics = {kind for file in files for kind in vars(file).values() if isinstance(kind, type)}
    metrics = {
        kind for kind in metrics if issubclass(kind, PluginMetric) and kind.__module__.startswith("avalanche_amnesia.")
    }
    metrics = {kind for kind in metrics if not kind.__module__.endswith(".bases")}
    assert {kind for kind in metrics if kind.axis != EVENT} == set()
    assert len(metrics) > 9


class FakeStrategy:
    """The clock of a strategy and the order in which its plugins are called."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.experience: Any = None
        self.clock = SimpleNamespace(train_iterations=0, train_exp_counter=0)

    def emit(self, callback: str, *names: str) -> None:
        x = self.clock.train_iterations
        values: Sequence[MetricValue] = [
            MetricValue(OwnAxis("event") if name.startswith("JSD") else None, name, 1.0, x) for name in names
        ]
        self.logger.log_metrics(values)
        getattr(self.logger, callback)(self, values)

    def train_label(self, *labels: int, **of_experience: Any) -> None:
        self.experience = SimpleNamespace(task_labels=list(labels), **of_experience)
        self.train_task()
        self.experience = None

    def train_task(self) -> None:
        self.emit("before_training_exp")
        for _ in range(2):
            self.emit("before_training_epoch")
            self.emit("after_training_iteration", "train_phase/mb")
            self.clock.train_iterations += 1
            self.emit("after_training_epoch", "train_phase/epoch")
        self.emit("after_training_exp", "train_phase/exp")
        self.clock.train_exp_counter += 1

    def unlearn(self) -> None:
        self.emit("before_unlearning", "residue")
        self.emit("after_unlearning", "residue")


def written(recorder: Recorder) -> list[tuple[str, int, int, int]]:
    """(name, iteration, task, event) of every value."""
    return [
        (name, row["iteration"], row["task"], row["event"])
        for row in recorder.read().rows
        for name in row
        if name not in ("iteration", "task", "event", "Events") and not name.startswith("_")
    ]


def test_a_task_counts_in_the_values_of_its_end(recorder: Recorder) -> None:
    strategy = FakeStrategy(recorder.logger)
    strategy.emit("after_eval", "eval_phase/acc")
    strategy.train_task()
    strategy.emit("after_eval", "eval_phase/acc")
    strategy.unlearn()
    strategy.train_task()
    assert written(recorder) == [
        ("eval_phase/acc", 0, -1, 0),
        ("train_phase/mb", 0, -1, 0),
        ("train_phase/epoch", 1, -1, 0),
        ("train_phase/mb", 1, -1, 0),
        ("train_phase/epoch", 2, -1, 0),
        ("train_phase/exp", 2, 0, 1),
        ("eval_phase/acc", 2, 0, 1),
        ("residue", 2, 0, 1),
        ("residue", 2, 0, 2),
        ("train_phase/mb", 2, 0, 2),
        ("train_phase/epoch", 3, 0, 2),
        ("train_phase/mb", 3, 0, 2),
        ("train_phase/epoch", 4, 0, 2),
        ("train_phase/exp", 4, 1, 3),
    ]


def test_unlearning_in_the_middle_of_a_task_comes_before_its_end(recorder: Recorder) -> None:
    strategy = FakeStrategy(recorder.logger)
    for callback in ("before_training_exp", "before_training_epoch", "after_training_epoch"):
        strategy.emit(callback)
    strategy.emit("before_training_epoch")
    strategy.unlearn()
    strategy.emit("after_training_exp", "train_phase/exp")
    assert [entry[2:] for entry in written(recorder)] == [(-1, 0), (-1, 1), (0, 2)]


def test_a_resumed_strategy_goes_on_counting(recorder: Recorder) -> None:
    strategy = FakeStrategy(recorder.logger)
    strategy.clock.train_exp_counter = 3
    strategy.emit("after_eval", "eval_phase/acc")
    strategy.train_task()
    strategy.emit("after_eval", "eval_phase/acc")
    places = [(task, event) for name, _, task, event in written(recorder) if name == "eval_phase/acc"]
    assert places == [(2, 3), (3, 4)]


def test_the_axis_of_tasks_carries_labels_also_of_one_learned_again(recorder: Recorder) -> None:
    strategy = FakeStrategy(recorder.logger)
    for label in (3, 0, 2, 0):
        strategy.train_label(label)
        strategy.unlearn()
        strategy.emit("after_eval", "eval_phase/acc")
    places = [(task, event) for name, _, task, event in written(recorder) if name == "eval_phase/acc"]
    assert places == [(3, 2), (0, 4), (2, 6), (0, 8)]


def test_an_experience_without_a_label_of_its_own_goes_by_its_number(recorder: Recorder) -> None:
    strategy = FakeStrategy(recorder.logger)
    stream = [SimpleNamespace(task_labels=[0]) for _ in range(3)]  # a stream without task labels: all are 0
    strategy.train_label(0, origin_stream=stream, current_experience=2)
    strategy.train_label(4, 5, current_experience=1)
    strategy.train_label(7)
    strategy.train_task()
    assert [task for name, _, task, _ in written(recorder) if name == "train_phase/exp"] == [2, 1, 7, 3]


def test_a_task_that_was_given_up_has_not_ended(recorder: Recorder) -> None:
    benchmark = with_unlearning(DIGITS, {})
    strategy = amnesiac(evaluator=EvaluationPlugin(evaluation.capacity_metrics(), loggers=[recorder.logger]))
    strategy.train(benchmark.train_stream[3])
    strategy.plugins.append(FailsAtEvent("after_training_epoch", KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        strategy.train(benchmark.train_stream[1])
    strategy.plugins.pop()
    strategy.abort_training()
    strategy.unlearn([3])
    assert [entry[2:] for entry in written(recorder) if entry[0] == "Capacity"] == [(3, 1), (3, 2)]


def test_metrics_are_drawn_over_their_axis(recorder: Recorder) -> None:
    strategy = FakeStrategy(recorder.logger)
    strategy.train_task()
    strategy.emit("after_eval", "Acc/eval_phase/test_stream", "JSD_Exp/eval_phase/test_stream")
    strategy.unlearn()
    assert recorder.read().metrics == {
        "iteration": None,
        "task": None,
        "event": None,
        "train_phase/mb": "iteration",
        "train_phase/epoch": "iteration",
        "train_phase/exp": "iteration",
        "Acc/eval_phase/test_stream": "task",
        "JSD_Exp/eval_phase/test_stream": "event",
        "residue": "event",
        "Events": "event",
    }


def test_one_row_per_callback_and_no_value_lost(recorder: Recorder) -> None:
    logger, strategy = recorder.logger, FakeStrategy(recorder.logger)
    values = [
        MetricValue(None, "a", 1.0, 5),
        MetricValue(None, "b", 2.0, 5),
        MetricValue(None, "a", 3.0, 5),
        MetricValue(None, "a", 4.0, 5),
        MetricValue(None, "b", 5.0, 5),
    ]
    logger.log_metrics(values)
    logger.after_eval(strategy, values)
    logger.log_metrics(values[:1])  # the same iteration again
    logger.after_eval(strategy, values[:1])
    rows = [{name: row[name] for name in ("a", "b") if name in row} for row in recorder.read().rows]
    assert rows == [{"a": 1, "b": 2}, {"a": 3, "b": 5}, {"a": 4}, {"a": 1}]


def test_values_without_a_strategy_lie_at_their_own_iteration(recorder: Recorder) -> None:
    FakeStrategy(recorder.logger).train_task()
    recorder.log("x", 1.0, iteration=17)
    recorder.logger.log_metrics([MetricValue(None, "y", 1.0, 18), MetricValue(None, "y", 2.0, 19)])
    assert written(recorder)[-3:] == [("x", 17, 0, 1), ("y", 18, 0, 1), ("y", 19, 0, 1)]


def test_an_axis_is_no_metric(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="'event' is an axis"):
        recorder.log("event", 1.0)
