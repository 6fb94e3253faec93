"""Axis of each metric, and the counters in the rows after each callback; settings and records of its run."""

import importlib
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import pytest
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics, loss_metrics
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from support.fault_injection import FailsAtEvent
from support.strategies import DIGITS, amnesiac, learn, make
from support.wandb_files import Recorder, read_offline_run, records, run_folders
from wandb.proto import wandb_internal_pb2

from avalanche_amnesia import UnlearningRequest, WandBLogger, evaluation, unlearned_accuracy_metrics, with_unlearning
from avalanche_amnesia.audit.record import UnlearningPlan, UnlearningRecord
from avalanche_amnesia.contrib import metrics as contrib_metrics
from avalanche_amnesia.logging.axes import Position, axis_of
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


def written(recorder: Recorder) -> list[tuple[str, int, int, int]]:
    """Return (name, iteration, task, event) of every value."""
    return [
        (name, row["iteration"], row["task"], row["event"])
        for row in recorder.read().rows
        for name in row
        if name not in ("iteration", "task", "event", "Events") and not name.startswith("_")
    ]


def assert_reviewed(recorder: Recorder, name: str) -> None:
    """Compare the positions of all values with a reviewed file: delete it to make a new one, and review it."""
    golden = Path(__file__).with_name(f"rows_of_{name}.txt")
    rows = sorted((*place, name) for name, *place in written(recorder))
    shown = "".join(" ".join(map(str, row)) + "\n" for row in rows)
    if not golden.exists():
        golden.write_text(shown)
    assert shown == golden.read_text()


METRICS = {"minibatch": True, "epoch": True, "experience": True}


def test_positions_of_values_are_those_reviewed(recorder: Recorder) -> None:
    """Task 2 is unlearned in the middle of task 3; task 4 is aborted, and task 3 unlearned."""
    stream = with_unlearning(DIGITS, [UnlearningRequest((2,), 3, "iteration", 1)]).train_stream
    metrics = loss_metrics(**METRICS), evaluation.capacity_metrics()
    strategy = amnesiac(train_epochs=1, evaluator=EvaluationPlugin(*metrics, loggers=[recorder.logger]))
    learn(strategy, stream, [2, 3])
    strategy.eval(DIGITS.test_stream)
    strategy.plugins.append(FailsAtEvent("after_training_epoch", KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        strategy.train(stream[4])
    strategy.plugins.pop()
    strategy.abort_training()
    strategy.unlearn([3])
    strategy.train(stream[1])
    assert_reviewed(recorder, "amnesiac")


def test_positions_of_values_of_a_stock_strategy_are_those_reviewed(recorder: Recorder) -> None:
    metrics = loss_metrics(**METRICS), forgetting_metrics(experience=True)
    evaluator = EvaluationPlugin(*metrics, loggers=[recorder.logger])
    strategy = make(Naive, optimizer="sgd", train_epochs=1, evaluator=evaluator)
    for experience in DIGITS.train_stream[:2]:
        strategy.train(experience)
        strategy.eval(DIGITS.test_stream[:2])
    assert_reviewed(recorder, "naive")


def strategy_at(experience: Any = None) -> SimpleNamespace:
    return SimpleNamespace(clock=SimpleNamespace(train_iterations=0, train_exp_counter=0), experience=experience)


def test_an_experience_without_its_own_label_has_its_number() -> None:
    stream, position = [SimpleNamespace(task_labels=[0]) for _ in range(3)], Position()
    for labels, about, task in (
        ([0], {"origin_stream": stream, "current_experience": 2}, 2),  # a stream without task labels: all are 0
        ([4, 5], {"current_experience": 1}, 1),
        ([7], {}, 7),
        (None, {}, 3),
    ):
        for callback in ("before_training_exp", "after_training_exp"):
            position.update(callback, strategy_at(SimpleNamespace(task_labels=labels, **about)))
        assert position.task == task


def test_each_callback_makes_one_row_and_no_value_is_lost(recorder: Recorder) -> None:
    logger, strategy = recorder.logger, strategy_at()
    values = [MetricValue(None, name, value, 5) for value, name in enumerate("abaab", start=1)]
    for emitted in (values, values[:1]):  # twice in the same iteration
        logger.log_metrics(emitted)
        logger.after_eval(strategy, emitted)
    rows = [{name: row[name] for name in ("a", "b") if name in row} for row in recorder.read().rows]
    assert rows == [{"a": 1, "b": 2}, {"a": 3, "b": 5}, {"a": 4}, {"a": 1}]


def test_values_without_a_strategy_have_their_own_iteration(recorder: Recorder) -> None:
    recorder.logger.after_training_exp(strategy_at(), [])
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
    table.add_number("Capacity", 1.0, "event")
    assert not table.changed
    assert table.table().rows == ()
    table.add_training(1, 3, (3,))
    table.add_number("Capacity", 0.9, "event")
    table.add_number("Capacity", 0.8, "event")
    table.add_training(2, 0, (3, 0))
    table.add_number("JSD_own/eval_phase/test_stream", 0.1, "event")
    first, second = by_column(table)
    assert (first["Capacity"], first["JSD_own"]) == (0.8, None)
    assert (second["Capacity"], second["JSD_own"]) == (None, 0.1)


def test_accuracy_is_the_mean_over_the_remaining_tasks():
    table = EventTable()
    table.add_unlearning(1, 2, None)
    table.add_training(2, 2, (0, 2))
    name = "Top1_Acc_Exp/eval_phase/test_stream/Task{0:03d}/Exp{0:03d}"
    for task, accuracy in ((0, 0.8), (1, 0.1), (2, 0.6), (0, 0.9)):
        table.add_number(name.format(task), accuracy, "task")
    table.add_number("Top1_Acc_Exp/eval_phase/train_stream/Task002/Exp002", 1.0, "task")
    assert [row["accuracy"] for row in by_column(table)] == [None, 0.75]


def test_values_of_one_task_of_one_layer_or_of_another_axis_have_no_column():
    table = EventTable()
    table.add_training(1, 0, None)
    for name, axis in (("JSD_own/eval_phase/test_stream/Task000", "event"), ("MaskUse/l.1", "event"), ("Loss", "task")):
        table.add_number(name, 0.5, axis)
    empty = dict.fromkeys(("unlearned", "remaining", "affected", "claim", "accuracy"))
    assert by_column(table) == [empty | {"event": 1, "what": "trained", "task": 0}]
    assert not table.changed


def test_unlearned_samples_are_described_in_words():
    nothing = dict.fromkeys(("removed", "affected", "compensated", "purges", "unpurged"), ())
    request = {"tasks": (), "event": "after task 3", "task": 1, "samples": ("a", "b"), "classes": (0,)}
    plan = UnlearningPlan(**request, **nothing, entries={}, shared={}, claim="exact", trajectory_bytes=0)
    table = EventTable()
    table.add_unlearning(4, 3, UnlearningRecord(plan, (), (), (3, 0, 2, 1), 4, 80, 0.1))
    (row,) = by_column(table)
    assert (row["unlearned"], row["remaining"]) == ("2 samples of task 1 (all of classes 0)", "3, 0, 2, 1")
    assert (row["affected"], row["claim"]) == ("", "exact")


BENCHMARK = with_unlearning(DIGITS, {1: [0]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, about = tmp_path_factory.mktemp("run"), {"group": "two seeds", "config": {"note": "mine", "seed": "kept"}}
    metrics = accuracy_metrics(experience=True), unlearned_accuracy_metrics(BENCHMARK)
    with WandBLogger(dir=folder, mode="offline", **about) as logger:
        strategy = amnesiac(train_epochs=1, seed=7, evaluator=EvaluationPlugin(*metrics, loggers=[logger]))
        for experience in BENCHMARK.train_stream[:3]:
            strategy.train(experience)
            strategy.eval(BENCHMARK.test_stream)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return read_offline_run(*run_folders(folder))


def test_a_run_has_the_name_and_settings_of_its_strategy(run):
    assert run.name == "AmnesiacHAT, seed 7"
    assert run.group == "two seeds"
    assert run.config["method"] == "AmnesiacHAT"
    assert run.config["optimizer"] == {"class": "Adam", "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-08}
    assert run.config["training"]["train_mb_size"] == 40
    assert run.config["stream"] == {"tasks": 5, "requests": ["task 0 after task 1"]}
    assert run.config["network"]["backbone"] == "MLP"
    assert set(run.config["options"]) == {"HATPlugin", "CounterfactualPlugin", "UnlearningPlugin"}
    assert run.config["versions"]["avalanche-lib"]
    assert (run.config["note"], run.config["seed"]) == ("mine", "kept")
    parts = {"method", "seed", "stream", "network", "optimizer", "training", "options", "versions", "note"}
    assert run.config.keys() == parts


def test_the_summary_has_the_record_and_no_accuracy_of_the_unlearned_task(run):
    (text,) = [text for name, text in run.summary.items() if name.startswith("Record/event")]
    assert text.startswith("Unlearned task 0 (after task 1)")
    name = "Top1_Acc_Exp/eval_phase/test_stream/Task{0:03d}/Exp{0:03d}"
    assert name.format(0) not in run.summary
    assert set(run.summary[name.format(1)]) == {"min", "max", "last"}
    assert any(name.startswith("UnlearnedAccuracy") and "Task000" in name for name in run.summary)
    assert name.format(0) in {key for row in run.rows for key in row}  # its history stays
    assert run.metrics[name.format(1)] == "task"
    assert {axis for metric, axis in run.metrics.items() if metric.startswith("UnlearnedAccuracy")} == {"event"}


def test_each_record_is_an_artefact(folder):
    kinds = []
    for data in records(next(run_folders(folder)[0].glob("*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "artifact" and record.artifact.type != "run_table":
            kinds.append((record.artifact.type, record.artifact.description, record.artifact.manifest))
    ((kind, told, manifest),) = kinds
    assert kind == "unlearning-record"
    assert told.startswith("Unlearned task 0 (after task 1)")
    (entry,) = manifest.contents
    assert entry.path == "record.json"
    assert UnlearningRecord.from_json(Path(entry.local_path).read_text()).tasks == (0,)
