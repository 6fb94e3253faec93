"""Slurm, through submitit."""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from avalanche_amnesia import checks


class SlurmExecutor:
    """Jobs in Slurm's queue (submitit); the program that asked must stay alive, on the login node for instance.

    Args:
        logs: folder of submitit's files, which all nodes reach.
        workers: how many jobs lie in the queue at a time.
        gpus: GPUs of a job: whole ones; for shares give Slurm's own options (``slurm_gres: shard:1``).
        parameters: of ``submitit.AutoExecutor.update_parameters``: ``timeout_min``, ``mem_gb``, ``slurm_partition`` …
        cluster: ``local``: processes of this machine instead of Slurm's, to try things out.

    Raises:
        ImportError: where submitit is not installed.
        ValueError: for a share of a GPU.
        FileNotFoundError: where there is no Slurm.
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
        try:
            import submitit
        except ImportError as error:
            raise ImportError('submitit is not installed: pip install "avalanche-amnesia[slurm]"') from error
        if gpus != int(gpus):
            raise ValueError(
                f"gpus={gpus}: Slurm gives whole GPUs; give 0, 1 …, or leave gpus out and say slurm_gres=shard:1"
            )
        if cluster == "slurm" and shutil.which("srun") is None:
            raise FileNotFoundError(
                "there is no Slurm here (no srun): run this on a node that submits jobs, or take another executor"
            )
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
        """Put a call into the queue, once there are fewer than ``workers`` in it."""
        return self._waiting.submit(self._call, function, arguments)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        job = self._executor.submit(function, *arguments)
        self._jobs.append(job)
        return job.result()

    def lost(self, error: BaseException) -> bool:
        """True where a job ended without a result and without an error of its own."""
        utils = self._submitit.core.utils
        return isinstance(error, utils.UncompletedJobError) and not isinstance(error, utils.FailedJobError)

    def close(self) -> None:
        """Take out of the queue what still lies there, and end what runs."""
        self._waiting.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            if not job.done():
                job.cancel()
