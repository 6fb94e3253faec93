"""Processes that train references before they are asked for."""

import functools
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from avalanche_amnesia import checks
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.lab.executors.process import worker_processes

_loaded: tuple[str, Any] = ("", None)
"""References that this process trains, where it is a worker, and the file that they came from."""


class ReferenceWorkers:
    """Worker processes on the cores that a run leaves idle; what they train lies in the references' store.

    All of a process are the same ones, which end with the program, or when nothing was asked of them for a minute; what
    they have not begun when the references go is left. Where a worker fails, the run trains what is missing itself, and
    meets the error there.

    Args:
        n: how many at a time, at least 1; one object per :class:`~avalanche_amnesia.evaluation.References`.
    """

    def __init__(self, n: int = 1) -> None:
        self._n = checks.whole_number("n", n)
        self._folder = tempfile.TemporaryDirectory(prefix="amnesia-references-", ignore_cleanup_errors=True)
        self._trainings: list[Any] = []

    def begin(self, references: References, paths: Iterable[tuple[Any, tuple[int, ...]]]) -> None:
        """Train what these references will be asked for, in this order."""
        names = ("make_strategy", "benchmark", "train_options", "store")
        file = Path(self._folder.name) / "references"
        file.write_bytes(cloudpickle.dumps({name: getattr(references, name) for name in names}))  # may be large: once
        executor = worker_processes(self._n)
        settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
        self._trainings += [executor.submit(_train, str(file), settings, *path) for path in paths]
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
        _loaded = (file, References(**cloudpickle.loads(Path(file).read_bytes())))
    _loaded[1].train_along(path, variant)
