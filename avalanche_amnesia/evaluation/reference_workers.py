"""Processes that train references before they are asked for."""

from __future__ import annotations

import functools
import signal
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from loky import get_reusable_executor

_loaded: tuple[str, Any] = ("", None)
"""References that this process trains, where it is a worker, and the file that they came from."""


class ReferenceWorkers:
    """Worker processes on the cores that a run leaves idle; what they train lies in the references' store.

    All references of a process share the workers, which end with the program, or when nothing was asked of them for a
    minute; what they have not begun when the references go is left. Where a worker fails, the run trains what is
    missing itself, and meets the error there.
    """

    def __init__(self, references: Any, n: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="amnesia-references-", ignore_cleanup_errors=True)
        self._file = Path(self._folder.name) / "references"
        self._file.write_bytes(cloudpickle.dumps(references))  # once: a benchmark may be large
        self._n = n
        self._trainings: list[Any] = []

    def train(self, paths: Iterable[tuple[Any, tuple[int, ...]]]) -> None:
        """Train references, in this order."""
        executor = get_reusable_executor(self._n, timeout=60, initializer=_begin)
        settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
        self._trainings += [executor.submit(_train, str(self._file), settings, *path) for path in paths]
        _end_with_the_program(executor)

    def failure(self) -> BaseException | None:
        """The first error that a worker met."""
        ended = [training for training in self._trainings if training.done()]
        return next((error for training in ended if (error := training.exception()) is not None), None)


@functools.cache
def _end_with_the_program(executor: Any) -> None:
    """Kill workers at the end of the program: the store holds whole states only, and nobody waits for these.

    Called behind the first submission: threading's hooks run last in, first out, and loky's own, which waits for
    what is still training, must come later.
    """
    threading._register_atexit(functools.partial(executor.shutdown, wait=False, kill_workers=True))  # type: ignore


def _begin() -> None:
    """Leave Ctrl-C to the run that asked for this worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _train(file: str, settings: tuple[int, bool, torch.dtype], variant: Any, path: tuple[int, ...]) -> None:
    """Train one reference, computing as the process does that asks for it."""
    global _loaded
    if not Path(file).exists():  # the references went, and the folder with them
        return
    threads, deterministic, dtype = settings
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
    if _loaded[0] != file:
        make, arguments = cloudpickle.loads(Path(file).read_bytes())
        _loaded = (file, make(**arguments))
    _loaded[1].train_along(path, variant)
