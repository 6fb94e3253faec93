"""The W&B run of a logger: where it comes from, its mode, and its end."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from avalanche.evaluation.metric_results import MetricValue
from support.wandb_files import Recorder, read_offline_run, run_folders

from avalanche_amnesia.logging import WandBLogger
from avalanche_amnesia.logging.wandb import _wait_until_written, resolve_mode


def test_two_loggers_write_two_runs(tmp_path: Path) -> None:
    folders = [tmp_path / "made" / "when missing", tmp_path / "b"]
    loggers = [
        WandBLogger(dir=folder, mode="offline", name=name, group="seeds", config={"lr": lr}, tags=["digits"])
        for folder, name, lr in zip(folders, ("HAT", "Naive"), (0.1, 0.2), strict=True)
    ]
    for step in range(3):
        for number, logger in enumerate(loggers):
            logger.log_single_metric("x", 10 * number + step, step)
    for logger in loggers:
        logger.finish()
    runs = [read_offline_run(*run_folders(folder)) for folder in folders]
    assert [run.name for run in runs] == ["HAT", "Naive"]
    assert [run.config for run in runs] == [{"lr": 0.1}, {"lr": 0.2}]
    assert [[row["x"] for row in run.rows] for run in runs] == [[0, 1, 2], [10, 11, 12]]
    assert {run.group for run in runs} == {"seeds"}
    assert {run.project for run in runs} == {"avalanche-amnesia"}
    assert [run.id for run in runs] == [logger.run_id for logger in loggers]
    assert all(run.complete for run in runs)


def test_a_logger_writes_to_a_run_that_the_user_made(tmp_path: Path) -> None:
    run = wandb.init(dir=str(tmp_path), mode="offline", name="mine", reinit="create_new")
    logger = WandBLogger(run)
    assert logger.run is run
    logger.log_single_metric("x", 1, 0)
    del logger
    run.log({"own": 2})  # still open
    logger = WandBLogger(run=run)
    logger.finish()
    (folder,) = run_folders(tmp_path)
    read = read_offline_run(folder)
    assert (read.name, read.complete) == ("mine", True)
    assert [(row.get("x"), row.get("own")) for row in read.rows] == [(1, None), (None, 2)]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with wandb.init(dir=str(tmp_path), mode="offline", reinit="create_new") as run:
        refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (lambda: WandBLogger(run, name="x", tags=["a"]), ValueError, "name, tags given beside run"),
            (lambda: WandBLogger(mode="ofline"), ValueError, "mode .*'online', 'offline', 'disabled', got 'ofline'"),
            (lambda: WandBLogger("run"), TypeError, "run is a str"),
            (lambda: WandBLogger(tags="digits", mode="offline"), TypeError, r"tags=\['digits'\]"),
            (lambda: WandBLogger(dir=__file__, mode="offline"), NotADirectoryError, "is a file"),
        ]
        for make, error, message in refused:
            with pytest.raises(error, match=message):
                make()


def test_the_mode_comes_from_the_argument_the_environment_or_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WandBLogger(dir=tmp_path / "no login") as logger:
        assert logger.run.offline
    assert len(run_folders(tmp_path / "no login")) == 1
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with WandBLogger(dir=tmp_path) as logger:
        assert logger.run.disabled
        logger.log_single_metric("x", 1, 0)
        logger.log_single_metric("picture", torch.rand(3, 4, 4), 0)
    assert run_folders(tmp_path) == []
    with WandBLogger(dir=tmp_path, mode="offline") as logger:
        assert not logger.run.disabled


def test_an_error_in_the_with_block_marks_the_run_as_failed(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(recorder.logger.run, "finish", lambda exit_code: codes.append(exit_code))
    monkeypatch.setattr("avalanche_amnesia.logging.wandb._wait_until_written", lambda file: None)
    with pytest.raises(KeyError), recorder.logger:
        raise KeyError
    assert codes == [1]
    monkeypatch.undo()
    recorder.logger._writer.run.finish()


def test_finish_again_does_nothing_and_later_values_are_refused(recorder: Recorder) -> None:
    recorder.log("x", 1)
    recorder.logger.finish()
    recorder.logger.finish()
    with pytest.raises(RuntimeError, match=f"{recorder.logger.run_id} of this logger is finished"):
        recorder.log("x", 2)
    recorder.logger.log_metrics([])  # what Avalanche sends at every callback
    with pytest.warns(UserWarning, match=f"{recorder.logger.run_id} of this logger is finished"):
        recorder.logger.log_metrics([MetricValue(None, "x", 3, 0)])
    recorder.logger.log_metrics([MetricValue(None, "x", 3, 0)])  # once
    recorder.logger.after_eval(object(), [])
    assert [row["x"] for row in recorder.read().rows] == [1]


class GrowingFile:
    """A file that grows during the first calls of ``stat``."""

    def __init__(self, times: int) -> None:
        self.left, self.size = times, 0

    def exists(self) -> bool:
        return True

    def stat(self) -> SimpleNamespace:
        self.size += self.left > 0
        self.left -= 1
        return SimpleNamespace(st_size=self.size)


def test_finish_waits_while_the_file_grows_and_warns_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    file: Any = GrowingFile(30)
    _wait_until_written(file)
    assert file.left < 0
    monkeypatch.setattr("avalanche_amnesia.logging.wandb._FLUSH_SECONDS", 0.05)
    endless: Any = GrowingFile(10**6)
    with pytest.warns(UserWarning, match="still writing"):
        _wait_until_written(endless)


def test_copies_are_the_same_logger_and_a_pickled_one_continues_in_another_run(
    recorder: Recorder, tmp_path: Path
) -> None:
    assert copy.deepcopy([recorder.logger])[0] is copy.copy(recorder.logger) is recorder.logger
    clock = SimpleNamespace(train_iterations=0, train_exp_counter=0)
    recorder.logger.after_training_exp(SimpleNamespace(clock=clock), [])
    loaded = pickle.loads(pickle.dumps(recorder.logger))
    assert loaded.run_id == recorder.logger.run_id
    assert len(run_folders(tmp_path)) == 1  # loading has started nothing
    loaded.finish()
    with pytest.raises(RuntimeError, match="loaded without its W&B run"):
        loaded.log_single_metric("x", 1, 0)
    loaded.attach(wandb.init(dir=str(tmp_path / "on"), mode="offline", reinit="create_new"))
    with pytest.raises(RuntimeError, match="writes to the run"):
        loaded.attach(recorder.logger.run)
    loaded.log_single_metric("x", 1, 0)
    loaded.finish()
    row, events = read_offline_run(*run_folders(tmp_path / "on")).rows
    assert "Events" in events
    assert (row["task"], row["event"]) == (0, 1)


NETRC = [
    (None, "api.wandb.ai", "online"),
    ("https://wandb.lab.org", "wandb.lab.org", "online"),
    ("https://wandb.lab.org", "api.wandb.ai", "offline"),
    (None, "github.com", "offline"),
]


def test_a_key_in_netrc_counts_only_for_the_server_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    for file in (tmp_path / "home" / ".netrc", tmp_path / "other netrc"):
        if file.name != ".netrc":
            monkeypatch.setenv("NETRC", str(file))
        for base_url, machine, mode in NETRC:
            file.write_text(f"machine {machine}\n  login user\n  password {'k' * 40}\n")
            file.chmod(0o600)
            monkeypatch.delenv("WANDB_BASE_URL", raising=False)
            if base_url is not None:
                monkeypatch.setenv("WANDB_BASE_URL", base_url)
            wandb.teardown()  # wandb remembers the environment of its first use in a process
            assert resolve_mode(None) == mode
        file.write_text("machine\n\x00 what")
        wandb.teardown()
        assert resolve_mode(None) == "offline"


def test_the_mode_is_read_from_wandbs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.teardown()
    assert resolve_mode(None) == "offline"
    modes = {"online": "online", "offline": "offline", "disabled": "disabled", "dryrun": "offline", "run": "online"}
    for variable, mode in modes.items():
        monkeypatch.setenv("WANDB_MODE", variable)
        assert resolve_mode(None) == mode
        assert [resolve_mode(given) for given in ("online", "offline")] == ["online", "offline"]
    monkeypatch.setenv("WANDB_MODE", "cloud")
    with pytest.raises(ValueError, match="WANDB_MODE must be one of 'online', 'offline', 'disabled', got 'cloud'"):
        resolve_mode(None)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    wandb.teardown()
    assert resolve_mode(None) == "online"
