"""Processes of their own that can be killed, and have imported the host already, which takes longer than most tests.

They are forked from a server that imported once, and hold nothing of the tests before.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

IMPORTED = ["support.resumable_run", "support.stored_run"]


def forked(target: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """A started process of a function that can be imported, with arguments that can be pickled."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=target, args=args)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server itself knows no other path
        process.start()
    return process


def run_script(script: Path) -> None:
    """Run a script to its end, in its folder."""
    process = forked(_run, script)
    process.join()
    assert process.exitcode == 0


def _run(script: Path) -> None:
    os.chdir(script.parent)
    runpy.run_path(str(script), run_name="__main__")
