"""Functions that create unlearning schedules (scenarios) for streams of n tasks; positions and tasks count from 0."""

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avalanche.benchmarks import CLScenario

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.requests import Requests, UnlearningRequest, reorder, with_unlearning
from avalanche_amnesia.checks import known_options
from avalanche_amnesia.seeding import derive_seed


@dataclass(frozen=True)
class Scenario:
    """Schedule of requests to unlearn, with tasks never to be unlearned, a deadline for requests, training order.

    Attributes:
        requests: requests in the form of :func:`with_unlearning`.
        permanent: tasks declared permanent at the end of their training.
        deadline: number of later tasks after which a task becomes permanent by itself; None: never.
        order: tasks in training order, possibly with repetitions; None: the order of the stream.
    """

    requests: Requests = ()
    permanent: tuple[int, ...] = ()
    deadline: int | None = None
    order: tuple[int, ...] | None = None

    def on(self, benchmark: CLScenario) -> CLScenario:
        """Return a copy of ``benchmark`` with the scenario's requests, permanent tasks, deadline and training order.

        Args:
            benchmark: a benchmark with the scenario's number of tasks, and task labels 0, 1, 2 …

        Raises:
            RequestError: if a request does not fit the benchmark.
            ValueError: as for :func:`with_unlearning`; or if ``order`` contains an unknown task.
        """
        if self.order is not None:
            n = len(benchmark.train_stream)
            positions = checks.integers("order", self.order, "positions of the train stream")
            if any(not 0 <= position < n for position in positions):
                raise ValueError(f"order={list(positions)}: the train stream has the positions 0 to {n - 1}")
            benchmark = reorder(benchmark, positions)
        return with_unlearning(benchmark, self.requests, self.permanent, self.deadline)

    @property
    def requested(self) -> frozenset[int]:
        """Return all tasks that a request unlearns, completely or in part."""
        given = self.requests.values() if isinstance(self.requests, Mapping) else self.requests
        return frozenset(task for one in given for task in (one.tasks if isinstance(one, UnlearningRequest) else one))


def none(n_tasks: int) -> Scenario:
    """Return a scenario (schedule of unlearning) without any request to unlearn."""
    checks.whole_number("n_tasks", n_tasks)
    return Scenario()


def listed(
    n_tasks: int,
    requests: Mapping[int, Sequence[int] | Mapping[str, Any]] | Sequence[Mapping[str, Any]] = (),
    permanent: Sequence[int] = (),
    deadline: int | None = None,
) -> Scenario:
    """Return a scenario with explicitly listed requests to unlearn, e.g. from a configuration file.

    Args:
        n_tasks: number of tasks in the stream.
        requests: position → tasks, ``{3: [0]}``, or the arguments of an :class:`UnlearningRequest`, ``{3: {"task": 1,
            "samples": [0, 7]}}``; or a list of such arguments, with ``at``.
        permanent: tasks declared permanent at the end of their training.
        deadline: number of later tasks after which a task becomes permanent by itself; None: never.

    Raises:
        TypeError: for an unknown argument of a request; :meth:`Scenario.on` checks the rest.
    """
    checks.whole_number("n_tasks", n_tasks)
    if isinstance(requests, Mapping):
        schedule: Any = {at: _as_request(one) for at, one in requests.items()}
    else:
        schedule = tuple(map(_as_request, requests))
    return Scenario(schedule, checks.integers("permanent", permanent, "tasks"), deadline)


def _as_request(given: Any) -> Any:
    if not isinstance(given, Mapping):  # a list of tasks
        return given
    known_options(given, inspect.signature(UnlearningRequest).parameters, "a request")
    return UnlearningRequest(**given)


def published(n_tasks: int) -> Scenario:
    """Return the AmnesiacHAT paper's schedule of unlearning, which repeats every five tasks.

    The first task is unlearned after the second, the second after the fourth, and the fifth after itself.
    """
    checks.whole_number("n_tasks", n_tasks, 2)
    pattern = {1: 0, 3: 1, 4: 4}
    return Scenario({at: [at - at % 5 + pattern[at % 5]] for at in range(n_tasks) if at % 5 in pattern})


def at_random(n_tasks: int, rate: float = 0.3, seed: int = 0) -> Scenario:
    """Return a scenario that unlearns each task not yet unlearned with probability ``rate``, after every task."""
    checks.whole_number("n_tasks", n_tasks, 2)
    checks.within("rate", rate, "[0, 1]")
    requests, remaining = {}, []
    for at in range(n_tasks):
        remaining.append(at)
        drawn = [t for t in remaining if random.Random(derive_seed(seed, "request", t, at)).random() < rate]
        if len(drawn) == len(remaining):
            drawn.remove(at)
        if drawn:
            requests[at] = drawn
            remaining = [task for task in remaining if task not in drawn]
    return Scenario(requests)


def oldest_first(n_tasks: int, every: int = 2) -> Scenario:
    """Return a scenario that unlearns the oldest task not yet unlearned, after every ``every`` tasks."""
    checks.whole_number("n_tasks", n_tasks, 2)
    every = checks.whole_number("every", every, 2)
    moments = range(every - 1, n_tasks, every)
    return Scenario({at: [position] for position, at in enumerate(moments)})


def newest_first(n_tasks: int, every: int = 2) -> Scenario:
    """Return a scenario that unlearns the task just trained, after every ``every`` tasks."""
    checks.whole_number("n_tasks", n_tasks, 2)
    every = checks.whole_number("every", every, 2)
    return Scenario({at: [at] for at in range(every - 1, n_tasks, every)})


def bursts(n_tasks: int, size: int = 2, every: int = 3) -> Scenario:
    """Return a scenario that unlearns the ``size`` oldest tasks left, all at once, after every ``every`` tasks."""
    size = checks.whole_number("size", size)
    every = checks.whole_number("every", every, size + 1)
    checks.whole_number("n_tasks", n_tasks, every)
    moments = range(every - 1, n_tasks, every)
    return Scenario({at: list(range(n * size, (n + 1) * size)) for n, at in enumerate(moments)})


def deadline(n_tasks: int, tasks: int = 2, every: int = 2) -> Scenario:
    """Return a scenario that unlearns every ``every``-th task just before it is permanent (after ``tasks`` more)."""
    tasks, every = checks.whole_number("tasks", tasks, 2), checks.whole_number("every", every, 2)
    checks.whole_number("n_tasks", n_tasks, tasks + 1)
    requested = range(0, n_tasks - tasks + 1, every)
    return Scenario({task + tasks - 1: [task] for task in requested}, deadline=tasks)


def permanent(n_tasks: int, every: int = 2) -> Scenario:
    """Return a scenario that unlearns each task after the next one, except every ``every``-th: these are permanent."""
    checks.whole_number("n_tasks", n_tasks, 3)
    stays = range(0, n_tasks, checks.whole_number("every", every, 2))
    return Scenario({at: [at - 1] for at in range(1, n_tasks) if at - 1 not in stays}, tuple(stays))


def mid_task(n_tasks: int, iteration: int = 10, every: int = 2) -> Scenario:
    """Return a scenario that unlearns the previous task at iteration ``iteration`` of every ``every``-th training."""
    checks.whole_number("n_tasks", n_tasks, 2)
    every = checks.whole_number("every", every, 2)
    iteration = checks.whole_number("iteration", iteration, 0)
    return Scenario(tuple(UnlearningRequest((at - 1,), at, "iteration", iteration) for at in range(1, n_tasks, every)))


def relearn(n_tasks: int, tasks: Sequence[int] = (0,), after: int = 1) -> Scenario:
    """Return a scenario that unlearns ``tasks`` after position ``after``, and trains them again after all others."""
    checks.whole_number("n_tasks", n_tasks, 2)
    again = checks.integers("tasks", tasks, "tasks")
    after = checks.whole_number("after", after, 0)
    if after >= n_tasks or not again or any(not 0 <= task <= after for task in again):
        raise ValueError(
            f"tasks={list(again)}, after={after}: the tasks must be trained by then, at position {after} of {n_tasks} "
            "at the latest; give tasks of 0 to after"
        )
    return Scenario({after: list(again)}, order=(*range(n_tasks), *again))
