"""Settings, name, summary, records, rows and axes of the W&B run of a strategy, of this package or of Avalanche."""

from pathlib import Path

import pytest
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin
from support.strategies import DIGITS, amnesiac
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
