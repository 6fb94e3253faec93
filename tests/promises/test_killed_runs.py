"""Runs that are killed, wherever, and go on from their last checkpoint end as if nothing had happened."""

import json
import os
import random
import signal
import time

import pytest
from support import resumable_run
from support.forked import forked

TRIALS = int(os.environ.get("AMNESIA_KILLS", "3"))


def begin(folder, kill_at=0):
    return forked(resumable_run.run, folder, kill_at)


def result_of(process, folder):
    process.join()
    assert process.exitcode == 0
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Result of a run that is not killed, and the seconds that it takes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start = time.monotonic()
    return result_of(begin(folder), folder), time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("at", ["any moment", "an operation on files"])
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_run_that_is_killed_twice_ends_as_one_that_was_not(tmp_path, undisturbed, trial, at):
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
