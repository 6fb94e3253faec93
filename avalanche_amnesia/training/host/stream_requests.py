"""Requests to unlearn that come with a stream: find the ones that are due, and check them in advance."""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import single_task, stream_of
from avalanche_amnesia.benchmarks.requests import UnlearningRequest, dry_run
from avalanche_amnesia.ledger import RequestError, TaskLedger
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.strategy import Strategy


class StreamRequests:
    """Record of a stream's requests to unlearn: those already started, and those due after a task but not yet done."""

    def __init__(self) -> None:
        self.known: set[int] = set()  # tasks of the streams
        self._fired: set[tuple[int, Any]] = set()
        self.waiting: list[tuple[int, Any]] = []  # requests after a finished task, in order, each with that task

    def state(self) -> dict[str, Any]:
        """Return the state to save: labels of all tasks in the streams so far, started and waiting requests."""
        fired, overdue = sorted(self._fired, key=repr), self.waiting
        written = [[(task, dict(vars(request))) for task, request in of] for of in (fired, overdue)]
        return {"known": self.known, "fired": written[0], "overdue": written[1]}

    def load_state(self, state: Any) -> None:
        """Restore a state that :meth:`state` returned."""
        known, fired, overdue = checked(
            state, known=set[int], fired=list[tuple[int, dict[str, Any]]], overdue=list[tuple[int, dict[str, Any]]]
        )
        read = [[(task, UnlearningRequest(**request)) for task, request in of] for of in (fired, overdue)]
        self.known, self._fired, self.waiting = known, set(read[0]), read[1]

    def dry_run(self, experience: Any, ledger: TaskLedger) -> None:
        """Check a task's requests to unlearn on a copy of the ledger, so that invalid ones fail before the training."""
        self.known |= {single_task(other) for other in stream_of(experience) or [experience]}
        coming = [
            *self.still_due(experience, "before", ledger.unlearned),
            *self.still_due(experience, "iteration", ledger.unlearned),
            *due(experience, "after"),
        ]
        permanent = bool(getattr(experience, "permanent", False))
        dry_run(copy(ledger), single_task(experience), coming, sorted(self.known), permanent=permanent)

    def still_due(self, experience: Any, when: str, unlearned: Collection[int]) -> list[Any]:
        """Return an experience's requests for the moment ``when``, except those done before an interruption."""
        task, done = single_task(experience), set(unlearned)
        return [
            request
            for request in due(experience, when)
            if (task, request) not in self._fired or not done.issuperset(request.tasks)
        ]

    def mark_started(self, task: int, request: Any) -> None:
        """Record that a request is about to be carried out. It counts as completed once its tasks are unlearned."""
        self._fired.add((task, request))

    def end_task(self, task: int, due_now: Sequence[Any]) -> None:
        """After a task's training: drop the requests started during it; add ``due_now`` to the waiting requests."""
        self._fired = {(of, request) for of, request in self._fired if of != task}
        self.waiting = [*self.waiting, *((task, request) for request in due_now)]

    def overdue_requests(self, unlearned: Collection[int]) -> list[tuple[int, Any]]:
        """Return the waiting requests, earliest first, each with the finished task after which it was due."""
        done = set(unlearned)
        self.waiting = [(task, request) for task, request in self.waiting if not done.issuperset(request.tasks)]
        return self.waiting

    def mark_answered(self, request: Any) -> None:
        """Drop a waiting request after it was carried out or refused."""
        self.waiting = [(task, other) for task, other in self.waiting if other is not request]


def due(experience: Any, when: str) -> list[Any]:
    """Return an experience's requests to unlearn at the moment ``when``: ``before``, ``iteration`` or ``after``."""
    return [request for request in getattr(experience, "requests", ()) if request.when == when]


def check_iterations(strategy: Strategy) -> None:
    """Raise RequestError if a request in the current or a later experience names an iteration that is never reached."""
    experience = strategy.experience
    size = checks.whole_number("train_mb_size", strategy.train_mb_size)
    epochs = checks.whole_number("train_epochs", strategy.train_epochs)
    for upcoming in stream_of(experience) or [experience]:
        requests = due(upcoming, "iteration")
        if requests and upcoming.current_experience >= experience.current_experience:
            batches = -(-len(upcoming.dataset) // size)
            for request in requests:
                check_iteration(request, single_task(upcoming), epochs * batches)


def check_iteration(request: Any, task: int | None, iterations: int) -> None:
    """Raise RequestError if a request's iteration is not below ``iterations``, the task's number of iterations."""
    if request.iteration >= iterations:
        raise RequestError(
            f"iteration {request.iteration} of task {task} never comes: choose 0 to {iterations - 1}, or when='after'"
        )
