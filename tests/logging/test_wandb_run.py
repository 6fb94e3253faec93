"""The W&B run of a logger: where it comes from, its mode, its end, and values of every type."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import wandb
from avalanche.evaluation.metric_results import AlternativeValues, MetricValue, TensorImage
from PIL import Image
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
            (lambda: WandBLogger(run, name="x", tags=["a"]), ValueError, "name, tags given with run"),
            (lambda: WandBLogger(mode="ofline"), ValueError, "mode .*'online', 'offline', 'disabled', got 'ofline'"),
            (lambda: WandBLogger("run"), TypeError, "run is a str"),
            (lambda: WandBLogger(tags="digits", mode="offline"), TypeError, r"tags=\['digits'\]"),
            (lambda: WandBLogger(dir=__file__, mode="offline"), NotADirectoryError, "is a file"),
        ]
        for make, error, message in refused:
            with pytest.raises(error, match=message):
                make()


def test_a_disabled_run_takes_values_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with WandBLogger(dir=tmp_path) as logger:
        assert logger.run.disabled
        logger.log_single_metric("x", 1, 0)
        logger.log_single_metric("number", torch.rand(1), 0)
    assert run_folders(tmp_path) == []
    monkeypatch.delenv("WANDB_MODE")
    with WandBLogger(dir=tmp_path) as logger:
        assert logger.run.offline  # there is no login


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
    with pytest.raises(RuntimeError, match=f"{recorder.logger.run_id} is finished"):
        recorder.log("x", 2)
    recorder.logger.log_metrics([])  # what Avalanche sends at every callback
    with pytest.warns(UserWarning, match=f"{recorder.logger.run_id} is finished"):
        recorder.logger.log_metrics([MetricValue(None, "x", 3, 0)])
    recorder.logger.log_metrics([MetricValue(None, "x", 3, 0)])  # once
    recorder.logger.after_eval(object(), [])
    assert [row["x"] for row in recorder.read().rows] == [1]


def growing(times: int) -> Any:
    """Return a file that grows during the first calls of ``stat``."""
    sizes = chain(range(times), repeat(times))
    return SimpleNamespace(exists=lambda: True, stat=lambda: SimpleNamespace(st_size=next(sizes)))


def test_finish_waits_while_the_file_grows_and_warns_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    file = growing(30)
    _wait_until_written(file)
    assert file.stat().st_size == 30
    monkeypatch.setattr("avalanche_amnesia.logging.wandb._FLUSH_SECONDS", 0.05)
    with pytest.warns(UserWarning, match="still writing"):
        _wait_until_written(growing(10**6))


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


def test_scalars_of_every_type_are_written_as_numbers(recorder: Recorder) -> None:
    scalars = [
        *((0.1, 0.1), (3, 3.0), (True, 1.0), (math.inf, math.inf), (-math.inf, -math.inf)),
        *((np.float64(0.2), 0.2), (np.float16(0.5), 0.5), (np.int64(-7), -7.0), (np.bool_(False), 0.0)),
        *((np.array(1.5), 1.5), (torch.tensor(2.5, requires_grad=True), 2.5), (torch.tensor(True), 1.0)),
        *((torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (torch.tensor([0.75]), 0.75)),
    ]
    for value, _ in [*scalars, (math.nan, None)]:
        recorder.log("x", value)
    *rows, last = recorder.read().rows
    assert [row["x"] for row in rows] == [expected for _, expected in scalars]
    assert math.isnan(last["x"])


def test_images_are_written_as_files_with_their_pixels(recorder: Recorder) -> None:
    red = torch.zeros(3, 5, 7)
    red[0, 1, 2] = 1.0
    figure = plt.figure(figsize=(2, 1), dpi=50)
    images = [
        (Image.new("RGB", (7, 5)), (7, 5)),
        (figure, None),
        (TensorImage(torch.zeros(5, 7, dtype=torch.uint8)), (7, 5)),
        (TensorImage(torch.rand(1, 5, 7)), (7, 5)),
        (TensorImage(torch.rand(3, 5, 3)), (3, 5)),
        (AlternativeValues(object(), Image.new("L", (7, 5)), torch.zeros(9)), (7, 5)),
        (TensorImage(red), (7, 5)),
    ]
    try:
        for value, _ in images:
            recorder.log("picture", value)
        assert plt.fignum_exists(figure.number)  # the user's figure stays open
    finally:
        plt.close(figure)
    for row, (_, size) in zip(recorder.read().rows, images, strict=True):
        assert row["picture"]["_type"] == "image-file"
        with Image.open(recorder.run_folder / "files" / row["picture"]["path"]) as picture:
            assert size is None or picture.size == size
            last = picture.copy()
    assert (last.getpixel((2, 1)), last.getpixel((1, 2))) == ((255, 0, 0), (0, 0, 0))


def test_dicts_are_split_into_values_and_texts_go_to_the_summary(recorder: Recorder) -> None:
    recorder.log("capacity", {"layer0": 0.5, "layer1": {"free": 0.25, 2: 1}})
    recorder.log("Unlearning/claim", "exact")
    run = recorder.read()
    (row,) = run.rows
    values = {name: value for name, value in row.items() if name.startswith("capacity")}
    assert values == {"capacity/layer0": 0.5, "capacity/layer1/free": 0.25, "capacity/layer1/2": 1.0}
    assert run.summary["Unlearning/claim"] == "exact"


def test_values_of_other_types_are_left_out_with_one_warning(recorder: Recorder) -> None:
    others = [None, b"blob", [1.0, 2.0], object(), 1j, np.array(["a"]), torch.full((3,), torch.nan)]
    for number, value in enumerate([*others, AlternativeValues(None)]):
        words = rf"'odd{number}' is a .*{type(value).__name__}.*Supported: numbers"
        with pytest.warns(UserWarning, match=words):
            recorder.log(f"odd{number}", value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recorder.log(f"odd{number}", value)
    assert recorder.read().rows == []
