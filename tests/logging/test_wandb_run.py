"""The W&B run: its origin, its content besides metrics, and its end."""

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
from avalanche_amnesia.logging.wandb import _wait_until_written


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


def test_a_run_that_is_passed_in(tmp_path: Path) -> None:
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


def test_arguments_of_a_new_run_beside_a_run(tmp_path: Path) -> None:
    with (
        wandb.init(dir=str(tmp_path), mode="offline", reinit="create_new") as run,
        pytest.raises(ValueError, match="name, config, tags given beside run"),
    ):
        WandBLogger(run, name="x", config={}, tags=["a"])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: WandBLogger(mode="ofline"), ValueError, "mode .*'online', 'offline', 'disabled', got 'ofline'"),
        (lambda: WandBLogger("run"), TypeError, "run is a str"),
        (lambda: WandBLogger(tags="digits", mode="offline"), TypeError, r"tags=\['digits'\]"),
        (lambda: WandBLogger(dir=__file__, mode="offline"), NotADirectoryError, "is a file"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_offline_where_nobody_is_logged_in(tmp_path: Path) -> None:
    with WandBLogger(dir=tmp_path) as logger:
        assert logger.run.offline
        assert not logger.run.disabled
    assert len(run_folders(tmp_path)) == 1


def test_wandb_mode_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with WandBLogger(dir=tmp_path) as logger:
        assert logger.run.disabled
        logger.log_single_metric("x", 1, 0)
        logger.log_single_metric("picture", torch.rand(3, 4, 4), 0)
    assert run_folders(tmp_path) == []
    with WandBLogger(dir=tmp_path, mode="offline") as logger:  # the argument is nearer than the environment
        assert not logger.run.disabled


def test_context_manager_marks_a_failed_run(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_finish_returns_when_everything_is_stored(tmp_path: Path) -> None:
    for number in range(5):
        recorder = Recorder(tmp_path / str(number))
        for step in range(200):
            recorder.log("x", step)
        run = recorder.read()
        assert run.complete
        assert [row["x"] for row in run.rows] == list(range(200))


class GrowingFile:
    """A file that grows at each of the first questions for its size."""

    def __init__(self, times: int) -> None:
        self.left, self.size = times, 0

    def exists(self) -> bool:
        return True

    def stat(self) -> SimpleNamespace:
        self.size += self.left > 0
        self.left -= 1
        return SimpleNamespace(st_size=self.size)


def test_finish_waits_while_the_file_grows() -> None:
    file: Any = GrowingFile(30)
    _wait_until_written(file)
    assert file.left < 0


def test_a_writer_that_does_not_end_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avalanche_amnesia.logging.wandb._FLUSH_SECONDS", 0.05)
    file: Any = GrowingFile(10**6)
    with pytest.warns(UserWarning, match="still writing"):
        _wait_until_written(file)


def test_copies_are_the_logger_itself(recorder: Recorder) -> None:
    assert copy.deepcopy({"loggers": [recorder.logger]})["loggers"][0] is recorder.logger
    assert copy.copy(recorder.logger) is recorder.logger


def test_a_pickled_logger_leaves_its_run_and_goes_on_in_another(recorder: Recorder, tmp_path: Path) -> None:
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
