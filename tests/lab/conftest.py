"""The command of the package, called in this process."""

from collections.abc import Callable

import pytest

from avalanche_amnesia.lab.command_line import main


@pytest.fixture
def amnesia(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that calls the command, checks its exit status, and returns what it printed.

    These are the errors of a status above 1, and otherwise the output.
    """

    def call(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(list(words)) == status, words
        told = capsys.readouterr()
        return told.err if status > 1 else told.out

    return call
