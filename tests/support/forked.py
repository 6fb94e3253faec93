"""Processes of their own that can be killed, and have imported everything already, which takes longer than most tests.

They are forked from a process that was forked from this one before its first test, and hold nothing of the tests.
"""

import contextlib
import ctypes
import fcntl
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_asked: list[socket.socket] = []
"""The way to the process that others are forked from."""
_NUMBER = struct.Struct("q")
_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A started process, a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid, self.exitcode = pid, None

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, or so many seconds: then ``exitcode`` is still None."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None:
            ended, status = os.waitpid(self.pid, 0 if end is None else os.WNOHANG)
            if ended:
                self.exitcode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end:
                return
            else:
                time.sleep(0.01)

    def is_alive(self) -> bool:
        """Return True if it still runs."""
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        """End it at once."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)


def forked(target: Callable[..., Any], *args: Any, files: Mapping[int, int] | None = None) -> Forked:
    """Start a process that calls a function, in this folder; for Linux.

    Args:
        target: a function that can be imported; an error ends the process with exit code 1, SystemExit with its own.
        args: its arguments, which can be pickled.
        files: number of an open file in the new process → its number here.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whose parent ends is this process's child
    if not _asked:
        begin_server()
    files, (told, tell) = files or {}, os.pipe()
    message = pickle.dumps((target, args, os.getcwd(), dict(os.environ), list(files), os.getpid()))
    socket.send_fds(_asked[0], [_NUMBER.pack(len(message))], [tell, *files.values()])
    _asked[0].sendall(message)
    os.close(tell)
    pid = _NUMBER.unpack(os.read(told, _NUMBER.size))[0]
    os.close(told)
    return Forked(pid)


def run_script(script: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> str:
    """Run a script to its end as the main program, in its folder.

    Returns:
        What it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "out", Path(folder) / "err"
        process = forked(_run, script, arguments, dict(environment), files)
        process.join()
        printed, error = (file.read_text() for file in files)
    assert process.exitcode == 0, error[-3000:]
    return printed


def _run(script: Path, arguments: tuple[str, ...], environment: dict[str, str], files: tuple[Path, Path]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(script.parent)
    for number, name, file in zip((1, 2), ("stdout", "stderr"), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)  # of its own processes too
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115 - until its end
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    # As at every program's end. multiprocessing would wait for other processes first: a minute for loky's idle workers.
    threading._shutdown()


# The process that others are forked from --------------------------------------------------------------------------


def begin_server() -> None:
    """Fork the process that others are forked from, as this one is now."""
    ours, its = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        try:
            _serve(its)
        finally:
            os._exit(0)
    its.close()
    _asked.append(ours)  # its closing, at the latest by the end of this process, ends the other


def _serve(asked: socket.socket) -> None:
    """Fork a process for every message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _bury())
    torch.set_num_threads(1)
    torch.manual_seed = torch.random.manual_seed  # that of every program
    while True:
        head, fds, _, _ = socket.recv_fds(asked, _NUMBER.size, 20)
        if not head:
            return
        message = asked.recv(*_NUMBER.unpack(head), socket.MSG_WAITALL)
        if os.fork() == 0:
            asked.close()
            try:
                _leave(message, *fds)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)


def _bury() -> None:
    """Take notice of processes that ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _leave(message: bytes, tell: int, *files: int) -> None:
    """Fork a process and end, so that it becomes a child of the one that asked for it."""
    if os.fork():
        return
    code = 1
    try:
        *begin, numbers, parent = pickle.loads(message)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while os.getppid() != parent:
            time.sleep(0.001)
        os.write(tell, _NUMBER.pack(os.getpid()))
        os.close(tell)
        far = [fcntl.fcntl(file, fcntl.F_DUPFD, 900) for file in files]  # out of the way of each other's numbers
        for file in files:
            os.close(file)
        for file, number in zip(far, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        _begin(*begin)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _begin(target: Callable[..., Any], args: Sequence[Any], folder: str, environment: Mapping[str, str]) -> None:
    # torch's pool of threads is made anew at its first use behind a fork. Autograd's threads would do so all at once.
    torch.set_num_threads(torch.get_num_threads())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    target(*args)
