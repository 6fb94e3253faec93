"""Killed runs that continue from their last checkpoint end like undisturbed ones."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_injection import FILE_OPERATIONS, at_operations
from support.forked import forked
from support.strategies import amnesiac
from support.strategy_state import bits, frozen, trajectory, unlearning_plugin

from avalanche_amnesia import SplitDigits, TrajectoryPlugin, UnlearningRequest, with_unlearning
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.saving.files import unsealed

REQUESTS = [
    UnlearningRequest(tasks=(0,), at=1),
    UnlearningRequest(tasks=(1,), at=3, when="iteration", iteration=4),
    UnlearningRequest(tasks=(2, 4), at=4),
]


OPERATIONS = [operation for operation in FILE_OPERATIONS if operation[1] != "write_bytes"]
"""Operations on the files of the logs alone."""


def keep(strategy: Any, folder: Path) -> None:
    torch.save(strategy, folder / "strategy.part")
    os.replace(folder / "strategy.part", folder / "strategy.pt")


def run(folder: Path, kill_at: int = 0, saved_first: bool = True) -> None:
    """Train the rest of the stream; write hashes of the final state into ``result.json``.

    Args:
        folder: for the saved strategy and the logs.
        kill_at: number of the operation on files at which it is killed, before it if odd, else after it.
        saved_first: whether it saves its strategy before the first task too.
    """
    torch.set_num_threads(1)
    operations = 0

    def count(number: int, done: bool) -> None:
        nonlocal operations
        operations = number
        if number == kill_at and done == (kill_at % 2 == 0):
            os.kill(os.getpid(), signal.SIGKILL)

    with at_operations(count, OPERATIONS):
        logs = folder / "logs"
        if (folder / "strategy.pt").exists():
            strategy = torch.load(folder / "strategy.pt", weights_only=False)
        else:
            strategy = amnesiac(train_mb_size=20, train_epochs=2, trajectory=TrajectoryPlugin(path=logs))
            if saved_first:
                keep(strategy, folder)
        stream = with_unlearning(SplitDigits(n_train=400, n_test=200), REQUESTS).train_stream
        for experience in stream[len(unlearning_plugin(strategy).trained) :]:
            strategy.train(experience)
            keep(strategy, folder)
        result = {
            "model": bits(strategy.model),
            "logs": hashlib.sha256(repr(frozen(dict(trajectory(strategy).logs))).encode()).hexdigest(),
            "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in logs.glob("task_*")},
            "index": {**unsealed((logs / "index.json").read_text()), "trajectory": None},
            "operations": operations,
        }
        (folder / "result.json").write_text(json.dumps(result))


TRIALS = int(os.environ.get("AMNESIA_KILLS", "2"))


def begin(folder, kill_at=0):
    return forked(run, folder, kill_at)


def result_of(process, folder):
    process.join()
    assert process.exitcode == 0
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Result of an undisturbed run, and its duration in seconds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start = time.monotonic()
    return result_of(begin(folder), folder), time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("at", ["any moment", "an operation on files"])
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_run_that_is_killed_twice_ends_like_an_undisturbed_one(tmp_path, undisturbed, trial, at):
    expected, seconds = undisturbed
    generator = random.Random(f"{at} {trial}")
    for _ in range(2):
        if at == "any moment":
            process = begin(tmp_path)
            time.sleep(generator.uniform(0, seconds))
            process.kill()
        else:
            process = begin(tmp_path, generator.randint(1, expected["operations"]))
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
    (tmp_path / "result.json").unlink(missing_ok=True)
    found = result_of(begin(tmp_path), tmp_path)
    assert {**found, "operations": None} == {**expected, "operations": None}


def begin_again(folder):
    """Begin again after a kill: by itself where no task was recorded, else with the help of the error's one line."""
    index = folder / "logs" / "index.json"
    if index.exists():
        words = rf"killed before it saved one\? Delete {re.escape(str(index.parent))} and begin again: that is safe"
        with pytest.raises(RequestError, match=words):
            run(folder, saved_first=False)
        shutil.rmtree(folder / "logs")
    run(folder, saved_first=False)


@pytest.mark.parametrize("kill_at", [1, 2, 4, 6, 8])
def test_a_run_that_is_killed_before_it_saved_begins_again(tmp_path, undisturbed, kill_at):
    process = forked(run, tmp_path, kill_at, False)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "strategy.pt").exists()
    found = result_of(forked(begin_again, tmp_path), tmp_path)
    assert {**found, "operations": None} == {**undisturbed[0], "operations": None}
