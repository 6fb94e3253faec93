"""Killed runs that continue from their last checkpoint end like undisturbed ones."""

import json
import os
import random
import re
import shutil
import signal
import time

import pytest
from support import resumable_run
from support.forked import forked

from avalanche_amnesia.ledger import RequestError

TRIALS = int(os.environ.get("AMNESIA_KILLS", "2"))


def begin(folder, kill_at=0):
    return forked(resumable_run.run, folder, kill_at)


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
            resumable_run.run(folder, saved_first=False)
        shutil.rmtree(folder / "logs")
    resumable_run.run(folder, saved_first=False)


@pytest.mark.parametrize("kill_at", [1, 2, 4, 6, 8])
def test_a_run_that_is_killed_before_it_saved_begins_again(tmp_path, undisturbed, kill_at):
    process = forked(resumable_run.run, tmp_path, kill_at, False)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "strategy.pt").exists()
    found = result_of(forked(begin_again, tmp_path), tmp_path)
    assert {**found, "operations": None} == {**undisturbed[0], "operations": None}
