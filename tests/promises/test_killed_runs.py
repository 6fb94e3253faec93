"""Killed runs that continue from their last saved state end like undisturbed ones."""

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from support.fault_injection import at_operations
from support.forked import forked
from support.strategies import amnesiac
from support.strategy_state import bits, frozen, trajectory, unlearning_plugin

from avalanche_amnesia import SplitDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.saving.files import STATE
from avalanche_amnesia.training.host.saving import load_state

REQUESTS = [
    UnlearningRequest(tasks=(0,), at=1),
    UnlearningRequest(tasks=(1,), at=3, when="iteration", iteration=4),
    UnlearningRequest(tasks=(2, 4), at=4),
]


def run(folder: Path, kill_at: int = 0) -> None:
    """Train the rest of the stream; write hashes of the final state into ``result.json``.

    Args:
        folder: for the saved state.
        kill_at: number of the operation on files at which it is killed, before it if odd, else after it.
    """
    torch.set_num_threads(1)
    operations = 0

    def count(number: int, done: bool) -> None:
        nonlocal operations
        operations = number
        if number == kill_at and done == (kill_at % 2 == 0):
            os.kill(os.getpid(), signal.SIGKILL)

    strategy = amnesiac(train_mb_size=20, train_epochs=2)
    with at_operations(count):
        if (folder / "state" / STATE).exists():
            load_state(strategy, folder / "state")
        stream = with_unlearning(SplitDigits(n_train=400, n_test=200), REQUESTS).train_stream
        for experience in stream[len(unlearning_plugin(strategy).trained) :]:
            strategy.train(experience)
            strategy.save(folder / "state")
        result = {
            "model": bits(strategy.model),
            "logs": hashlib.sha256(repr(frozen(dict(trajectory(strategy).logs))).encode()).hexdigest(),
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
