"""Processes of their own that can be killed, and have imported the host already, which takes longer than most tests.

They are forked from a server that imported once, and hold nothing of the tests before.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
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
