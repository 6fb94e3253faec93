"""Executor that runs jobs in local processes."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any

import loky
import torch

from avalanche_amnesia import checks


class ProcessExecutor:
    """Executor that runs jobs in local processes (loky); if one process is lost, all processes are replaced.

    Args:
        workers: number of processes; None: one per core, or as many as fit on the GPUs.
        gpus: fraction of a GPU per job, in (0, 1]; 0: none. Processes are distributed over the GPUs in turn.

    Raises:
        ValueError: a value is not allowed, or there is no GPU.
    """

    def __init__(self, workers: int | None = None, gpus: float = 0) -> None:
        self._n_gpus = 0
        if not 0 <= gpus <= 1:
            raise ValueError(f"gpus must be a share of one GPU, 0 to 1, on this machine's processes; got {gpus!r}")
        if gpus:
            self._n_gpus = torch.cuda.device_count()
            if not self._n_gpus:
                raise ValueError(f"gpus={gpus}: this machine has no GPU that torch can use; leave gpus out")
        fit = int(self._n_gpus / gpus) if gpus else loky.cpu_count()
        self.workers: int | None = fit if workers is None else checks.whole_number("workers", workers)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Submit a function call to a process, and return the future of the call's result."""
        future: Future[Any] = worker_processes(self.workers, self._n_gpus).submit(function, *arguments)
        return future

    def lost(self, error: BaseException) -> bool:
        """Return True if ``error`` means that a process ended before its call returned."""
        return isinstance(error, BrokenExecutor)

    def close(self) -> None:
        """Kill the worker processes, even busy ones; saved states stay valid, because they are written atomically."""
        worker_processes(self.workers, self._n_gpus).shutdown(wait=True, kill_workers=True)


def worker_processes(n: int | None, n_gpus: int = 0) -> Any:
    """Return a pool of ``n`` processes (None: one per core), each with one of ``n_gpus`` GPUs; reused until a crash."""
    return loky.get_reusable_executor(n, timeout=60, initializer=_init_worker, initargs=(n_gpus, os.getpid()))


def _init_worker(n_gpus: int, program: int) -> None:
    """Prepare a worker process: ignore Ctrl-C, end with the main program, and see only one GPU, if jobs use GPUs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(program,), daemon=True).start()
    if n_gpus:
        number = int(multiprocessing.current_process().name.rpartition("-")[2])
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = shown[number % n_gpus]


def _end_after(program: int) -> None:
    """End this process after the main program has ended, even if the main program was killed."""
    # Linux can signal the death of a parent (PR_SET_PDEATHSIG), but does so when the thread that forked ends.
    while os.getppid() == program:  # an orphan gets a new parent
        time.sleep(1)
    os._exit(1)
