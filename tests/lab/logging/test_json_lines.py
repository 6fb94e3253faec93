"""Runs of JSON lines: readable after a kill, continued after a pickle, and sent to W&B once."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from avalanche.evaluation.metric_results import AlternativeValues, MetricValue
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.training.plugins import EvaluationPlugin
from PIL import Image
from support.logged_runs import read_json_run
from support.strategies import DIGITS, amnesiac
from support.wandb_files import read_offline_run, run_folders

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.contrib.metrics import capacity_pictures_metrics
from avalanche_amnesia.evaluation import accuracy_matrix_metrics, capacity_metrics, unlearned_accuracy_metrics
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.evaluation.figures import Table
from avalanche_amnesia.lab.logging import JSONLogger, sync
from avalanche_amnesia.lab.logging.run_lines import RUN_FILE, JSONRunError
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.logging import WandBLogger
from avalanche_amnesia.logging.payloads import Histogram

BENCHMARK = with_unlearning(DIGITS, {1: [0]})


def test_without_pictures_their_tables_are_kept(tmp_path: Path) -> None:
    metrics = accuracy_metrics(experience=True), loss_metrics(epoch=True), unlearned_accuracy_metrics(BENCHMARK)
    pictures = capacity_metrics(), capacity_pictures_metrics(), accuracy_matrix_metrics()
    with JSONLogger(tmp_path / "run", pictures=False) as logger:
        evaluator = EvaluationPlugin(*metrics, *pictures, loggers=[logger])
        strategy = amnesiac(train_epochs=1, seed=7, evaluator=evaluator)
        for experience in BENCHMARK.train_stream[:3]:
            strategy.train(experience)
            strategy.eval(BENCHMARK.test_stream)
    run = read_json_run(tmp_path / "run")
    rows = run.rows
    assert not any(name.startswith("Top1") and "Task000" in name for name in run.summary)  # it is unlearned
    assert not (tmp_path / "run" / "media").exists()
    assert not any(isinstance(value, Image.Image) for row in rows for value in row.values())
    assert sum("Figure/AccuracyMatrix/table" in row for row in rows) == 3


def test_log_events_ends_a_moment_of_a_task_without_evaluation(tmp_path: Path) -> None:
    with JSONLogger(tmp_path / "run") as logger:
        evaluator = EvaluationPlugin(capacity_metrics(), loggers=[logger])
        strategy = amnesiac(train_epochs=1, evaluator=evaluator)
        for experience in DIGITS.train_stream[:2]:
            strategy.train(experience)
            logger.log_events()
            logger.log_events()  # nothing happened since
    run = read_run(tmp_path / "run")
    assert [(moment.task, moment.remaining) for moment in run.moments] == [(0, (0,)), (1, (0, 1))]
    assert run.last.number("Capacity") == network_capacity(strategy)


def test_values_of_every_type_are_read_back(tmp_path: Path) -> None:
    table = Table(("a", "b"), ((1, None), ("x", 2.5)))
    values = {
        "float": 0.1,
        "nan": math.nan,
        "infinite": -math.inf,
        "picture": AlternativeValues(Image.new("RGB", (3, 2), (255, 0, 0))),
        "histogram": torch.arange(10.0),
        "table": table,
        "text": "exact",
        "taken apart": {"x": np.float32(0.5)},
    }
    with JSONLogger(tmp_path / "run") as logger:
        logger.log_metrics([MetricValue(None, name, value, 4) for name, value in values.items()])
    run = read_json_run(tmp_path / "run")
    (row,) = run.rows
    assert (row["float"], row["infinite"], row["taken apart/x"], row["iteration"]) == (0.1, -math.inf, 0.5, 4)
    assert math.isnan(row["nan"])
    assert row["picture"].getpixel((2, 1)) == (255, 0, 0)
    assert isinstance(row["histogram"], Histogram)
    assert row["histogram"].counts.sum() == 10
    assert row["table"] == table
    assert run.summary["text"] == "exact"
    for line in (tmp_path / "run" / RUN_FILE).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_killed_run_is_read_without_its_cut_line(tmp_path: Path) -> None:
    with JSONLogger(tmp_path / "run") as logger:
        for step in range(5):
            logger.log_single_metric("x", step, step)
    file = tmp_path / "run" / RUN_FILE
    whole = file.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[0], len(whole), 5):
        file.write_bytes(whole[:size])
        run = read_json_run(tmp_path / "run")
        assert not run.complete
        assert [row["x"] for row in run.rows] == list(range(max(0, sum(end <= size for end in ends) - 2)))


def test_pickled_and_finished_loggers_take_no_values(tmp_path: Path) -> None:
    logger = JSONLogger(tmp_path / "run")
    logger.log_single_metric("x", 1, 0)
    loaded = pickle.loads(pickle.dumps(logger))
    with pytest.raises(RuntimeError, match=r"loaded without its run, .*: make a new JSONLogger"):
        loaded.log_single_metric("x", 2, 1)
    logger.finish()
    logger.finish()
    with pytest.raises(RuntimeError, match="is finished"):
        logger.log_single_metric("x", 3, 2)
    run = read_json_run(tmp_path / "run")
    assert [row["x"] for row in run.rows] == [1]
    assert run.complete


def test_damaged_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JSONRunError, match=f"holds no {RUN_FILE}"):
        read_json_run(tmp_path)
    with JSONLogger(tmp_path / "run") as logger:
        logger.log_single_metric("x", 1, 0)
    whole = (tmp_path / "run" / RUN_FILE).read_text()
    for content, words in (
        ("", "no whole line"),
        ('{"kind": "row"}\n', "does not begin like"),
        ("[]\n", "line 1 of .* is broken"),
        ('{"kind": "run", "format": "avalanche-amnesia run", "version": 2}\n', "does not begin like"),
        (whole.replace('"metric": "x"', '"metric: "x"'), "line 2 of"),
    ):
        (tmp_path / RUN_FILE).write_text(content)
        with pytest.raises(JSONRunError, match=words):
            read_json_run(tmp_path)


def test_wrong_arguments_and_used_folders_are_refused(tmp_path: Path) -> None:
    JSONLogger(tmp_path / "run").finish()
    with pytest.raises(JSONRunError, match="not an empty folder"):
        JSONLogger(tmp_path / "run")
    with pytest.raises(TypeError, match="not JSON serializable"):
        JSONLogger(tmp_path / "other", config={"net": object()})
    assert not (tmp_path / "other").exists()


def short_run(folder: Path, value: float = 1.0, **about: Any) -> Path:
    with JSONLogger(folder, **about) as logger:
        for step in range(3):
            logger.log_single_metric("Loss/train_phase", value * step, step)
        logger.log_single_metric("MaskUse/layers.1", 0.5, 3)
        logger.log_single_metric("claim", "exact", 3)
    return folder


def test_a_run_is_sent_once(tmp_path: Path, amnesia: Any) -> None:
    short_run(tmp_path / "runs" / "a", name="A", group="seeds", job_type="reference", config={"lr": 0.1})
    short_run(tmp_path / "runs" / "b", value=2.0)
    command = ["sync", str(tmp_path / "runs"), "--mode", "offline", "--project", "digits"]
    said = amnesia(*command).splitlines()
    assert [line.endswith(read_json_run(tmp_path / "runs" / name).id) for name, line in zip("ab", said, strict=True)]
    assert "4 rows written as an offline run of project digits" in said[0]
    ours = read_json_run(tmp_path / "runs" / "a")
    theirs = read_offline_run(*run_folders(tmp_path / "runs" / "a"))
    assert theirs.project == "digits"
    for name in ("id", "name", "group", "job_type", "config", "metrics", "complete"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in theirs.rows] == ours.rows
    assert theirs.summary["claim"] == "exact"
    for name in ("Loss/train_phase", "MaskUse/layers.1"):
        assert theirs.summary[name] == ours.summary[name]
    assert all("was sent before" in line for line in amnesia(*command).splitlines())
    assert len(run_folders(tmp_path / "runs" / "a")) == 1


def test_a_run_that_has_grown_is_sent_again_under_its_identifier(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    logger = JSONLogger(folder)
    logger.log_single_metric("x", 1.0, 0)
    (outcome,) = sync([folder], mode="offline")
    assert outcome.result == "sent"
    assert read_offline_run(*run_folders(folder)).complete
    logger.log_single_metric("x", 2.0, 1)
    logger.finish()
    (outcome,) = sync([folder], mode="offline")
    assert outcome.result == "sent"
    run = read_offline_run(*run_folders(folder))
    assert [row["x"] for row in run.rows] == [1, 2]
    assert run.id == read_json_run(folder).id


def test_a_broken_run_does_not_stop_the_other_runs(tmp_path: Path, amnesia: Any) -> None:
    file = short_run(tmp_path / "a") / RUN_FILE
    file.write_text(file.read_text().replace('"kind": "row"', '"kind": row', 1))
    short_run(tmp_path / "b")
    broken, whole = amnesia("sync", str(tmp_path), "--mode", "offline", status=1).splitlines()
    assert "failed, JSONRunError: line 3 of" in broken
    assert "4 rows written" in whole
    assert run_folders(tmp_path / "a") == []


def test_folders_without_runs_of_json_lines_are_refused(tmp_path: Path, amnesia: Any) -> None:
    amnesia("sync", str(tmp_path / "absent"), status=2)
    assert "holds no run" in amnesia("sync", str(tmp_path), status=2)
    with pytest.raises(ValueError, match="'disabled' sends nothing"):
        sync([], mode="disabled")
    with WandBLogger(dir=tmp_path / "theirs", mode="offline") as logger:
        logger.log_single_metric("x", 1, 0)
    with pytest.raises(FileNotFoundError, match="sent by `wandb sync`"):
        sync([tmp_path], mode="offline")


def test_a_run_sent_online_keeps_its_id_and_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JSONLogger(tmp_path / "audit", job_type="audit") as logger:
        logger.log_single_metric("x", 1, 0)
    begun: dict[str, Any] = {}
    begin = wandb.init

    def init(**options: Any) -> Any:
        begun.update(options)
        run = begin(**{**options, "mode": "offline"})
        monkeypatch.setattr(type(run), "offline", False)
        return run

    monkeypatch.setattr(wandb, "init", init)
    (outcome,) = sync([tmp_path], mode="online")
    assert outcome.result == "sent", outcome
    assert (begun["mode"], begun["id"], begun["job_type"]) == ("online", read_json_run(tmp_path / "audit").id, "audit")
    assert "resume" not in begun
