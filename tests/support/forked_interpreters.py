"""Interpreters that libraries begin anew (``python -m module …``), forked instead: each would import the host first."""

import os
import runpy
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any
from unittest import mock

from support.forked import Forked, forked


@contextmanager
def forked_interpreters() -> Iterator[None]:
    """Fork what loky and submitit would begin, in this block and in the processes begun there.

    They come from the process that others are forked from, and so hold as little of this one as new interpreters.
    """
    if sys.platform != "linux":
        yield
        return
    with (
        mock.patch("loky.backend.fork_exec.fork_exec", _fork_exec),
        mock.patch("joblib.externals.loky.backend.fork_exec.fork_exec", _fork_exec),  # of a loky that takes its place
        mock.patch("submitit.local.local.subprocess", mock.Mock(Popen=Popen)),
    ):
        yield


class Popen(Forked):
    """As much of :class:`subprocess.Popen` as submitit asks for."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        shell: bool,
        env: Mapping[str, str],
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        encoding: str | None = None,
    ) -> None:
        files = {number: file.fileno() for number, file in ((1, stdout), (2, stderr)) if file is not None}
        super().__init__(forked(_interpret, list(command), dict(env), files=files).pid)

    def poll(self) -> int | None:
        """Its exit code, the negative number of a signal that ended it, or None where it still runs."""
        self.join(0)
        return self.exitcode

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, where it still runs."""
        if self.is_alive():
            os.kill(self.pid, number)


def _fork_exec(command: Sequence[str], keep: Iterable[int], env: Mapping[str, str] | None = None) -> int:
    """Begin as loky's function of this name does."""
    files = {int(fd): int(fd) for fd in keep}
    return forked(_interpret, list(command), {**os.environ, **(env or {})}, files=files).pid


def _interpret(command: list[str], environment: Mapping[str, str]) -> None:
    """Run ``python [-u] -m module …`` as the main program."""
    os.environ.clear()
    os.environ.update(environment)
    at = command.index("-m") + 1
    sys.argv = command[at:]
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy: the module was imported already
    with forked_interpreters():
        runpy.run_module(command[at], run_name="__main__", alter_sys=True)
