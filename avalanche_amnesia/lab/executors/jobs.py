"""Run jobs in the order of their dependencies, on any executor with the interface of ``concurrent.futures``."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from avalanche_amnesia import checks


@dataclass(frozen=True)
class Job:
    """A function call for a worker, with the names of the jobs that must finish before it.

    Attributes:
        name: unique name.
        function: function in a module that workers can import.
        arguments: positional arguments; workers must be able to open files named here.
        needs: names of jobs that must finish first.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    needs: frozenset[str] = frozenset()


OnDone = Callable[[Job, Any, int], None]


class NeedFailedError(RuntimeError):
    """Error for a job that never started because a job that it needs failed."""


class Executor(Protocol):
    """Interface of executors: submit jobs to workers, detect lost workers, and close.

    Attributes:
        workers: maximum number of jobs submitted at a time, so that jobs run in their order; None: no maximum.
    """

    workers: int | None

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Submit a function call to a worker, and return the future of the call's result."""

    def lost(self, error: BaseException) -> bool:
        """Return True if an error means that the worker was lost, not that the call failed."""

    def close(self) -> None:
        """End running jobs and free all resources."""


def run_jobs(
    jobs: Sequence[Job],
    executor: Executor,
    *,
    retries: int = 2,
    on_done: OnDone = lambda job, result, n_left: None,
) -> dict[str, BaseException]:
    """Run jobs in order, each after the jobs that it needs; a failed job does not stop independent jobs.

    Args:
        jobs: jobs with distinct names; needed jobs are among them, and none waits for itself.
        executor: runs the jobs; it is not closed.
        retries: how often a job is restarted after its worker was lost, at least 0.
        on_done: called with each job that ends, its result or error, and the number of jobs left.

    Returns:
        Name of each failed job → its error; :class:`NeedFailedError` if a job that it needs failed.
    """
    retries = checks.whole_number("retries", retries, 0)
    waiting = {job.name: job for job in jobs}
    done: set[str] = set()
    failed: dict[str, BaseException] = {}
    running: dict[Future[Any], Job] = {}
    begun: Counter[str] = Counter()

    def end_job(job: Job, result: Any) -> None:
        done.add(job.name)
        if isinstance(result, BaseException):
            failed[job.name] = result
        on_done(job, result, len(jobs) - len(done))

    def start_job(job: Job) -> None:
        begun[job.name] += 1
        running[executor.submit(job.function, *job.arguments)] = job

    while waiting or running:
        for job in [job for job in waiting.values() if job.needs <= done]:
            if executor.workers is not None and len(running) >= executor.workers:
                break
            del waiting[job.name]
            if causes := sorted(job.needs & failed.keys()):
                end_job(job, NeedFailedError(f"not begun, as {causes[0]} failed"))
            else:
                start_job(job)
        some = wait(running, return_when=FIRST_COMPLETED).done if running else ()
        for future in [future for future in running if future in some]:  # in order of submission
            job, error = running.pop(future), future.exception()
            if error is not None and executor.lost(error) and begun[job.name] <= retries:
                start_job(job)
            else:
                end_job(job, future.result() if error is None else error)
    return failed
