"""Runs of JSON lines sent to W&B: once, complete, and each on its own."""

from pathlib import Path
from typing import Any

import pytest
import wandb
from support.logged_runs import read_json_run
from support.wandb_files import read_offline_run, run_folders

from avalanche_amnesia.audit.record import UnlearningPlan, UnlearningRecord
from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.lab.logging import JSONLogger, sync
from avalanche_amnesia.lab.logging.run_lines import RUN_FILE
from avalanche_amnesia.logging import WandBLogger

PLAN = UnlearningPlan((1, 2), "after 3 trainings", {}, (), (), (), {}, "approximate", 0, (), ())
RECORD = UnlearningRecord(PLAN, (), (), (0,), 3, 30, 0.1)


def short_run(folder: Path, value: float = 1.0, **about: Any) -> Path:
    with JSONLogger(folder, **about) as logger:
        for step in range(3):
            logger.log_single_metric("Loss/train_phase", value * step, step)
        logger.log_single_metric("MaskUse/layers.1", 0.5, 3)
        logger.log_single_metric("claim", "exact", 3)
    return folder


def test_a_run_is_sent_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short_run(tmp_path / "runs" / "a", name="A", group="seeds", job_type="reference", config={"lr": 0.1}, tags=["x"])
    short_run(tmp_path / "runs" / "b", value=2.0)
    command = ["sync", str(tmp_path / "runs"), "--mode", "offline", "--project", "digits"]
    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()
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
    assert main(command) == 0
    assert all("was sent before" in line for line in capsys.readouterr().out.splitlines())
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


def test_a_broken_run_does_not_stop_the_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = short_run(tmp_path / "a") / RUN_FILE
    file.write_text(file.read_text().replace('"kind": "row"', '"kind": row', 1))
    short_run(tmp_path / "b")
    assert main(["sync", str(tmp_path), "--mode", "offline"]) == 1
    broken, whole = capsys.readouterr().out.splitlines()
    assert "failed, JSONRunError: line 3 of" in broken
    assert "4 rows written" in whole
    assert run_folders(tmp_path / "a") == []


def test_folders_without_runs_of_json_lines_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", str(tmp_path / "absent")]) == 2
    assert main(["sync", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
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
