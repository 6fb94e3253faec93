"""Executors for clusters: Ray, and Slurm through submitit."""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from avalanche_amnesia import checks


class RayExecutor:
    """Executor on a Ray cluster: Ray places jobs by cores and GPU fractions, and repeats the calls of lost workers.

    Args:
        address: address of a running cluster, such as ``auto`` or ``ray://head:10001``; None: RAY_ADDRESS if set, else
            only this machine.
        gpus: number of GPUs per job, or a fraction of one.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: there is no cluster at the address.
    """

    def __init__(self, address: str | None = None, *, gpus: float = 0) -> None:
        ray = _import_module("ray", "Ray", "ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.workers: int | None = None  # Ray decides
        self._ray = ray
        self._remote = cache(lambda function: ray.remote(function).options(num_cpus=1, num_gpus=gpus))  # sent once
        self._owned = not ray.is_initialized()
        if self._owned:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Submit a function call to a Ray worker, and return the future of the call's result."""
        future: Future[Any] = self._remote(function).remote(*arguments).future()
        return future

    def lost(self, error: BaseException) -> bool:
        """Return True if ``error`` means that Ray lost a worker, node or result, or ran out of memory."""
        of_ray = self._ray.exceptions
        kinds = (of_ray.WorkerCrashedError, of_ray.NodeDiedError, of_ray.OutOfMemoryError, of_ray.ObjectLostError)
        return isinstance(error, kinds)

    def close(self) -> None:
        """Disconnect from the cluster, and so end running jobs, if this object made the connection."""
        if self._owned:
            self._ray.shutdown()


class SlurmExecutor:
    """Executor with Slurm's queue (submitit); the submitting program must stay alive, for example on the login node.

    Args:
        logs: folder for submitit's files, on a file system that all nodes share.
        workers: maximum number of jobs in the queue.
        gpus: whole GPUs per job; for fractions use Slurm's own options (``slurm_gres: shard:1``).
        parameters: for ``submitit.AutoExecutor.update_parameters``: ``timeout_min``, ``mem_gb``, ``slurm_partition`` …
        cluster: ``local`` runs the jobs in processes of this machine, for trials.

    Raises:
        ImportError: submitit is not installed.
        ValueError: ``gpus`` is a fraction.
        FileNotFoundError: Slurm is not installed here.
    """

    def __init__(
        self,
        logs: Path,
        *,
        workers: int = 64,
        gpus: float = 0,
        parameters: Mapping[str, Any] | None = None,
        cluster: Literal["slurm", "local"] = "slurm",
    ) -> None:
        submitit = _import_module("submitit", "submitit", "slurm")
        if gpus != int(gpus):
            raise ValueError(f"gpus={gpus}: Slurm gives whole GPUs; give 0, 1 …, or say slurm_gres=shard:1")
        if cluster == "slurm" and shutil.which("srun") is None:
            raise FileNotFoundError("there is no Slurm here (no srun): run this on a node that submits jobs")
        self._submitit = submitit
        self._executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        self._executor.update_parameters(
            **{"cpus_per_task": 1, "timeout_min": 60, "gpus_per_node": int(gpus), "name": "amnesia"}
            | dict(parameters or {})
        )
        self.workers: int | None = checks.whole_number("workers", workers)
        self._waiting = ThreadPoolExecutor(self.workers)
        self._jobs: list[Any] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Submit a function call once fewer than ``workers`` calls are unfinished; return a future of the result."""
        return self._waiting.submit(self._call, function, arguments)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        job = self._executor.submit(function, *arguments)
        self._jobs.append(job)
        return job.result()

    def lost(self, error: BaseException) -> bool:
        """Return True if ``error`` says that a job was lost (killed or crashed); False if its function raised it."""
        utils = self._submitit.core.utils
        return isinstance(error, utils.UncompletedJobError) and not isinstance(error, utils.FailedJobError)

    def close(self) -> None:
        """Cancel waiting and running jobs."""
        self._waiting.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            if not job.done():
                job.cancel()


def _import_module(module: str, name: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f'{name} is not installed: pip install "avalanche-amnesia[{extra}]"') from error
