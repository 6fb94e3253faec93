"""A Ray cluster, or Ray on this machine."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class RayExecutor:
    """Workers of a Ray cluster; Ray places them by cores and shares of GPUs, and repeats calls of lost ones itself.

    Args:
        address: of a running cluster, such as ``auto`` or ``ray://head:10001``; None: Ray's own choice
            (RAY_ADDRESS, else only this machine).
        gpus: GPUs, or a share of one, that a job takes.

    Raises:
        ImportError: where Ray is not installed.
        ConnectionError: where there is no cluster at the address.
    """

    def __init__(self, address: str | None = None, *, gpus: float = 0) -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError('Ray is not installed: pip install "avalanche-amnesia[ray]"') from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.workers: int | None = None  # Ray knows how many fit
        self._ray, self._options = ray, {"num_cpus": 1, "num_gpus": gpus}
        self._known: dict[Callable[..., Any], Any] = {}
        self._owned = not ray.is_initialized()
        if self._owned:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Ask a worker for a call."""
        if function not in self._known:  # sent to the cluster once
            self._known[function] = self._ray.remote(function).options(**self._options)
        future: Future[Any] = self._known[function].remote(*arguments).future()
        return future

    def lost(self, error: BaseException) -> bool:
        """True where worker or node ended, or memory ran out, more often than Ray repeats a call by itself."""
        of_ray = self._ray.exceptions
        kinds = (of_ray.WorkerCrashedError, of_ray.NodeDiedError, of_ray.OutOfMemoryError, of_ray.ObjectLostError)
        return isinstance(error, kinds)

    def close(self) -> None:
        """Leave the cluster, which ends what this program still runs there."""
        if self._owned:
            self._ray.shutdown()
