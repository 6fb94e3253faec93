"""Axis of each metric, and the counters in the rows after each callback."""

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
from avalanche_amnesia.audit.record import UnlearningPlan, UnlearningRecord
from avalanche_amnesia.contrib import metrics as contrib_metrics
from avalanche_amnesia.logging.axes import axis_of
from avalanche_amnesia.logging.event_table import EventTable
from avalanche_amnesia.logging.names import EVENT

EPOCH, EXP = "Loss_Epoch/train_phase/train_stream/Task000", "Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000"
AXIS_OF = [
    *((EPOCH, callback, "iteration") for callback in ("after_training_epoch", None)),
    *((EXP, callback, "task") for callback in ("after_eval_exp", None)),
    ("Mystery", "after_eval", "task"),
    ("Mystery", "after_training", "iteration"),
    ("Mystery", None, "iteration"),
    ("Mystery", "before_unlearning", "event"),
    ("Top1_Acc_Exp/eval_phase/test_stream", "after_unlearning", "event"),
    ("Capacity/train_phase/layer0", "after_training_exp", "iteration"),
]


def test_the_axis_follows_from_the_name_and_the_callback() -> None:
    assert [(name, callback, axis_of(name, callback)) for name, callback, _ in AXIS_OF] == AXIS_OF


class OwnAxis:
    """A metric that states its axis."""

    def __init__(self, axis: str) -> None:
        self.axis = axis


def test_the_axis_that_a_metric_states_takes_precedence() -> None:
    for axis in ("iteration", "task", "event"):
        for callback in (None, "after_eval", "after_training_exp", "after_unlearning"):
            assert axis_of("Mystery/eval_phase/test_stream", callback, OwnAxis(axis)) == axis
    with pytest.raises(ValueError, match=r"OwnAxis.axis='epoch' is unknown; allowed are iteration, task, event"):
        axis_of("Mystery", None, OwnAxis("epoch"))


def test_all_metrics_of_this_package_state_the_axis_of_events() -> None:
    rooms = (evaluation, contrib_metrics)
    names = [f"{room.__name__}.{file.name}" for room in rooms for file in iter_modules(room.__path__)]
    kinds = {kind for name in names for kind in vars(importlib.import_module(name)).values() if isinstance(kind, type)}
    metrics = {kind for kind in kinds if issubclass(kind, PluginMetric) and not kind.__module__.endswith(".bases")}
    metrics = {kind for kind in metrics if kind.__module__.startswith("avalanche_amnesia.")}
    assert {kind for kind in metrics if kind.axis != EVENT} == set()
    assert len(metrics) > 9


class FakeStrategy:
    """A strategy's clock, and its callbacks in their order."""

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
    """Return (name, iteration, task, event) of every value."""
    return [
        (name, row["iteration"], row["task"], row["event"])
        for row in recorder.read().rows
        for name in row
        if name not in ("iteration", "task", "event", "Events") and not name.startswith("_")
    ]


def test_the_counter_of_tasks_rises_at_the_end_of_a_task(recorder: Recorder) -> None:
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


def test_an_unlearning_during_a_task_is_counted_before_the_end_of_the_task(recorder: Recorder) -> None:
    strategy = FakeStrategy(recorder.logger)
    for callback in ("before_training_exp", "before_training_epoch", "after_training_epoch"):
        strategy.emit(callback)
    strategy.emit("before_training_epoch")
    strategy.unlearn()
    strategy.emit("after_training_exp", "train_phase/exp")
    assert [entry[2:] for entry in written(recorder)] == [(-1, 0), (-1, 1), (0, 2)]


def test_an_experience_without_its_own_label_has_its_number(recorder: Recorder) -> None:
    strategy = FakeStrategy(recorder.logger)
    stream = [SimpleNamespace(task_labels=[0]) for _ in range(3)]  # a stream without task labels: all are 0
    strategy.train_label(0, origin_stream=stream, current_experience=2)
    strategy.train_label(4, 5, current_experience=1)
    strategy.train_label(7)
    strategy.train_task()
    assert [task for name, _, task, _ in written(recorder) if name == "train_phase/exp"] == [2, 1, 7, 3]


def test_an_aborted_training_does_not_count_as_a_task(recorder: Recorder) -> None:
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


def test_each_callback_makes_one_row_and_no_value_is_lost(recorder: Recorder) -> None:
    logger, strategy = recorder.logger, FakeStrategy(recorder.logger)
    values = [MetricValue(None, name, value, 5) for value, name in enumerate("abaab", start=1)]
    for emitted in (values, values[:1]):  # twice in the same iteration
        logger.log_metrics(emitted)
        logger.after_eval(strategy, emitted)
    rows = [{name: row[name] for name in ("a", "b") if name in row} for row in recorder.read().rows]
    assert rows == [{"a": 1, "b": 2}, {"a": 3, "b": 5}, {"a": 4}, {"a": 1}]


def test_values_without_a_strategy_have_their_own_iteration(recorder: Recorder) -> None:
    FakeStrategy(recorder.logger).train_task()
    recorder.log("x", 1.0, iteration=17)
    recorder.logger.log_metrics([MetricValue(None, "y", 1.0, 18), MetricValue(None, "y", 2.0, 19)])
    with pytest.raises(ValueError, match="'event' is an axis"):
        recorder.log("event", 1.0)
    assert written(recorder)[-3:] == [("x", 17, 0, 1), ("y", 18, 0, 1), ("y", 19, 0, 1)]


def by_column(table: EventTable) -> list[dict]:
    made = table.table()
    return [dict(zip(made.columns, row, strict=True)) for row in made.rows]


def test_a_value_belongs_to_the_event_before_it_and_the_last_value_counts():
    table = EventTable()
    table.take("Capacity", 1.0, "event")
    assert not table.changed
    assert table.table().rows == ()
    table.trained(1, 3, (3,))
    table.take("Capacity", 0.9, "event")
    table.take("Capacity", 0.8, "event")
    table.trained(2, 0, (3, 0))
    table.take("JSD_own/eval_phase/test_stream", 0.1, "event")
    first, second = by_column(table)
    assert (first["Capacity"], first["JSD_own"]) == (0.8, None)
    assert (second["Capacity"], second["JSD_own"]) == (None, 0.1)


def test_accuracy_is_the_mean_over_the_remaining_tasks():
    table = EventTable()
    table.unlearned(1, 2, None)
    table.trained(2, 2, (0, 2))
    name = "Top1_Acc_Exp/eval_phase/test_stream/Task{0:03d}/Exp{0:03d}"
    for task, accuracy in ((0, 0.8), (1, 0.1), (2, 0.6), (0, 0.9)):
        table.take(name.format(task), accuracy, "task")
    table.take("Top1_Acc_Exp/eval_phase/train_stream/Task002/Exp002", 1.0, "task")
    assert [row["accuracy"] for row in by_column(table)] == [None, 0.75]


def test_values_of_one_task_of_one_layer_or_of_another_axis_have_no_column():
    table = EventTable()
    table.trained(1, 0, None)
    for name, axis in (("JSD_own/eval_phase/test_stream/Task000", "event"), ("MaskUse/l.1", "event"), ("Loss", "task")):
        table.take(name, 0.5, axis)
    empty = dict.fromkeys(("unlearned", "remaining", "affected", "claim", "accuracy"))
    assert by_column(table) == [empty | {"event": 1, "what": "trained", "task": 0}]
    assert not table.changed


def test_unlearned_samples_are_described_in_words():
    nothing = dict.fromkeys(("removed", "affected", "compensated", "purges", "unpurged"), ())
    request = {"tasks": (), "event": "after task 3", "task": 1, "samples": ("a", "b"), "classes": (0,)}
    plan = UnlearningPlan(**request, **nothing, entries={}, shared={}, claim="exact", trajectory_bytes=0)
    table = EventTable()
    table.unlearned(4, 3, UnlearningRecord(plan, (), (), (0, 1, 2, 3), 4, 80, 0.1))
    (row,) = by_column(table)
    assert (row["unlearned"], row["remaining"]) == ("2 samples of task 1 (all of classes 0)", "0, 1, 2, 3")
