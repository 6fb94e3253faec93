"""Worker processes that train references (retrained models) before metrics need the references."""

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
from avalanche_amnesia.unlearning.claims import TRAINED_DATA

_loaded: tuple[str, Any] = ("", None)
"""In a worker process: the file of the last loaded references, and these references."""


class ReferenceWorkers:
    """Trainer of references on idle cores: worker processes train models and save them to the references' store.

    All objects of a program share one pool of workers, which end with the program or after an idle minute. Once the
    references are deleted, waiting trainings are skipped. If a worker fails, the run trains the missing reference and
    raises the error there. Create one object per :class:`~avalanche_amnesia.evaluation.References`.

    Args:
        n: number of workers, at least 1.
    """

    def __init__(self, n: int = 1) -> None:
        self._n = checks.whole_number("n", n)
        self._folder = tempfile.TemporaryDirectory(prefix="amnesia-references-", ignore_cleanup_errors=True)
        self._trainings: list[Any] = []

    def begin(self, references: References, paths: Iterable[tuple[Any, tuple[int, ...]]]) -> None:
        """Start training one reference model per (variant, tasks in training order) in ``paths``, in this order."""
        names = ("make_strategy", "benchmark", "train_options", "store")
        file = Path(self._folder.name) / "references"
        file.write_bytes(cloudpickle.dumps(({name: getattr(references, name) for name in names}, TRAINED_DATA)))
        executor = worker_processes(self._n)
        settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
        self._trainings += [executor.submit(_train, str(file), settings, *path) for path in paths]
        _kill_workers_at_exit(executor)

    def failure(self) -> BaseException | None:
        """Return the first error of a worker's training, or None if no training failed."""
        ended = [training for training in self._trainings if training.done()]
        return next((error for training in ended if (error := training.exception()) is not None), None)


@functools.cache
def _kill_workers_at_exit(executor: Any) -> None:
    """Register an exit hook that kills the workers; saved states stay valid, because they are written atomically.

    Call this after the first submission: threading's exit hooks run in reverse order of registration, and this hook
    must run before loky's hook, which waits for running trainings.
    """
    threading._register_atexit(functools.partial(executor.shutdown, wait=False, kill_workers=True))  # type: ignore


def _train(file: str, settings: tuple[int, bool, torch.dtype], variant: Any, path: tuple[int, ...]) -> None:
    """In a worker: load :class:`References` from a file, and train one with the main process's torch settings."""
    global _loaded
    if not Path(file).exists():  # deleted together with the references
        return
    threads, deterministic, dtype = settings
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
    if _loaded[0] != file:
        arguments, trained = cloudpickle.loads(Path(file).read_bytes())
        TRAINED_DATA.update(trained)
        _loaded = (file, References(**arguments))
    _loaded[1].train_along(path, variant)
