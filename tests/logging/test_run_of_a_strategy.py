"""Settings, name, summary, records, rows and axes of the W&B run of a strategy, of this package or of Avalanche."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics, loss_metrics
from avalanche.logging import InteractiveLogger, TensorboardLogger, TextLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from support.strategies import DIGITS, amnesiac, make
from support.wandb_files import read_offline_run, records, run_folders
from wandb.proto import wandb_internal_pb2

from avalanche_amnesia import WandBLogger, unlearned_accuracy_metrics, with_unlearning
from avalanche_amnesia.audit.record import UnlearningRecord

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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("finished")
    with WandBLogger(dir=folder, mode="offline") as logger, (folder / "log.txt").open("w") as text:
        evaluator = EvaluationPlugin(
            accuracy_metrics(minibatch=True, epoch=True, experience=True, stream=True),
            loss_metrics(epoch=True, experience=True),
            forgetting_metrics(experience=True, stream=True),
            loggers=[InteractiveLogger(), TextLogger(text), TensorboardLogger(folder / "tb"), logger],
        )
        strategy = make(Naive, optimizer="sgd", train_mb_size=64, evaluator=evaluator)
        for experience in DIGITS.train_stream[:2]:
            strategy.train(experience)
            strategy.eval(DIGITS.test_stream[:2])
    found = {"all_metrics": evaluator.get_all_metrics(), "iterations": strategy.clock.train_iterations}
    return SimpleNamespace(run=read_offline_run(*run_folders(folder)), **found)


def test_the_axes_of_the_rows_never_decrease(finished: SimpleNamespace) -> None:
    axes = [(row["iteration"], row["task"], row["event"]) for row in finished.run.rows]
    for before, after in pairwise(axes):
        assert all(a <= b for a, b in zip(before, after, strict=True))
    assert axes[0] == (0, -1, 0)
    assert axes[-1] == (finished.iterations, 1, 2)  # two task ends


def test_each_metric_has_its_axis_and_evaluations_the_counter_of_their_moment(finished: SimpleNamespace) -> None:
    for name in finished.all_metrics:
        assert finished.run.metrics[name] == ("task" if "eval_phase" in name else "iteration")
    name = next(n for n in finished.all_metrics if n.startswith("Top1_Acc_Stream/eval_phase/test_stream"))
    assert [row["task"] for row in finished.run.rows_with(name)] == [0, 1]
