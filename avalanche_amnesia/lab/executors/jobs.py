"""Jobs that wait for others, on any executor in the shape of ``concurrent.futures``."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from avalanche_amnesia import checks


@dataclass(frozen=True)
class Job:
    """A call that a worker makes.

    Attributes:
        name: of its own.
        function: of a module that workers can import.
        arguments: what it is called with; files among them lie where workers reach them.
        needs: names of jobs that must be done before.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JobDone:
    """Outcome of a job.

    Attributes:
        job: that ended.
        result: what its function returned.
        error: that ended it; None: it went well.
        n_done: jobs that ended by now.
        n_jobs: of all.
    """

    job: Job
    result: Any
    error: BaseException | None
    n_done: int
    n_jobs: int


class NeedFailedError(RuntimeError):
    """A job was not begun, as one that it needs failed."""


class Executor(Protocol):
    """Runner of jobs.

    Attributes:
        workers: jobs that it is given at a time, so that those which come first in the list are done first; None: all.
    """

    workers: int | None

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Ask a worker for a call."""

    def lost(self, error: BaseException) -> bool:
        """Tell whether an error says that a worker was lost, and nothing about the call."""

    def close(self) -> None:
        """End what still runs, and free what the executor holds."""


def run_jobs(
    jobs: Sequence[Job],
    executor: Executor,
    *,
    retries: int = 2,
    on_done: Callable[[JobDone], None] = lambda done: None,
) -> dict[str, BaseException]:
    """Run jobs, each when those are done that it needs, in their order; where one fails, the others go on.

    Args:
        jobs: of distinct names.
        executor: where they run; it stays open.
        retries: how often a job is begun again whose worker was lost, at least 0.
        on_done: called when a job ends.

    Returns:
        Job → the error that ended it; a job whose needs failed has a :class:`NeedFailedError`.

    Raises:
        ValueError: for two jobs of one name, a need that is no job, or jobs that wait for each other.
    """
    retries = checks.whole_number("retries", retries, 0)
    waiting = {job.name: job for job in jobs}
    _check(jobs, waiting)
    done: set[str] = set()
    failed: dict[str, BaseException] = {}
    running: dict[Future[Any], Job] = {}
    begun: Counter[str] = Counter()

    def ended(job: Job, result: Any, error: BaseException | None) -> None:
        done.add(job.name)
        if error is not None:
            failed[job.name] = error
        on_done(JobDone(job, result, error, len(done), len(jobs)))

    def begin(job: Job) -> None:
        begun[job.name] += 1
        running[executor.submit(job.function, *job.arguments)] = job

    while waiting or running:
        for job in [job for job in waiting.values() if job.needs <= done]:
            if executor.workers is not None and len(running) >= executor.workers:
                break
            del waiting[job.name]
            causes = sorted(job.needs & failed.keys())
            if causes:
                ended(job, None, NeedFailedError(f"not begun, as {causes[0]} failed"))
            else:
                begin(job)
        some = wait(running, return_when=FIRST_COMPLETED).done if running else ()
        for future in [future for future in running if future in some]:  # in the order in which they were begun
            job, error = running.pop(future), future.exception()
            if error is not None and executor.lost(error) and begun[job.name] <= retries:
                begin(job)
            else:
                ended(job, None if error is not None else future.result(), error)
    return failed


def _check(jobs: Sequence[Job], by_name: dict[str, Job]) -> None:
    if len(by_name) < len(jobs):
        raise ValueError(f"jobs must have distinct names, got {[job.name for job in jobs]}")
    reached: set[str] = set()
    left = dict(by_name)
    while ready := [name for name, job in left.items() if job.needs <= reached]:
        reached |= set(ready)
        left = {name: job for name, job in left.items() if name not in reached}
    if left:
        name, job = next(iter(left.items()))
        raise ValueError(f"{name} needs {sorted(job.needs - reached)}, which is no job, or waits for {name} itself")
