"""Requests to unlearn, attached to experiences of a benchmark; copies of benchmarks without requests or samples."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal

from avalanche.benchmarks import CLScenario, EagerCLStream
from avalanche.benchmarks.utils import concat_datasets

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import attribute_of, labels_fingerprint, targets_of
from avalanche_amnesia.benchmarks.stream_labels import copy_of, labelled_benchmark, scenario_like
from avalanche_amnesia.benchmarks.tasks import TaskExperience
from avalanche_amnesia.ledger import RequestError, TaskLedger

When = Literal["after", "before", "iteration"]
_FIRING_ORDER = ("before", "iteration", "after")


@dataclass(frozen=True)
class UnlearningRequest:
    """Request to unlearn tasks, or samples or classes of one task, at a moment of the training stream.

    Args:
        tasks: labels of the tasks to unlearn, at least one.
        at: position in the train stream, from 0, of the experience that carries the request; None: the last one.
        when: before that experience's training, after it, or at an iteration of it.
        iteration: only for ``when="iteration"``: the number of finished iterations of that experience's
            training, from 0.
        task: instead of ``tasks``, the task to retrain without ``samples`` and ``classes``, after an experience.
        samples: positions in the task's training data, from 0.
        classes: labels in the task's training data.

    Raises:
        RequestError: for an invalid value; :func:`with_unlearning` checks the tasks against the stream.
    """

    tasks: tuple[int, ...] = ()
    at: int | None = None
    when: When = "after"
    iteration: int | None = None
    task: InitVar[int | None] = field(default=None, kw_only=True)
    samples: tuple[int, ...] = field(default=(), kw_only=True)
    classes: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self, task: int | None) -> None:
        try:
            checks.one_of("when", self.when, When)
            for name, number in (("at", self.at), ("iteration", self.iteration)):
                if number is not None:
                    object.__setattr__(self, name, checks.whole_number(name, number, 0))
            if not isinstance(self.tasks, Iterable):
                raise ValueError(f"{self.tasks!r} are no tasks; give a list of ints, e.g. [0, 2]")
            for name in ("samples", "classes"):
                numbers = checks.integers(name, getattr(self, name), name)
                if min(numbers, default=0) < 0:
                    raise ValueError(f"{name}={list(numbers)}: {name} are counted from 0")
                object.__setattr__(self, name, tuple(sorted(set(numbers))))
        except ValueError as error:
            raise RequestError(f"request{'' if self.at is None else f' at position {self.at}'}: {error}") from None
        if (self.when == "iteration") != (self.iteration is not None):
            raise RequestError(
                f"request at position {self.at}: when={self.when!r} and iteration={self.iteration!r} don't go "
                "together: when='iteration' needs iteration, an int of at least 0"
            )
        given = self.tasks if task is None else (*self.tasks, task)
        tasks = tuple(task if (label := checks.integer(task)) is None else label for task in given)
        object.__setattr__(self, "tasks", tasks)
        if self.is_partial and (len(tasks) != 1 or self.when != "after"):
            raise RequestError(
                f"request for samples or classes of tasks {list(tasks)}, when={self.when!r}: name one task, "
                "unlearn(task=2, samples=[0, 7]) or UnlearningRequest(task=2, samples=[0, 7]), with when='after'"
            )
        if task is not None and not self.is_partial:
            raise RequestError(
                f"task={task!r} needs samples=[…] or classes=[…] of it, at least one; a whole task goes by [{task!r}]"
            )

    @property
    def is_partial(self) -> bool:
        """Return True if only samples or classes of a task are to be unlearned, not the whole task."""
        return bool(self.samples or self.classes)

    @property
    def gone(self) -> tuple[int, ...]:
        """Return the labels of the tasks to unlearn completely."""
        return () if self.is_partial else self.tasks

    def event(self, task: int) -> str:
        """Return the request's moment as text, e.g. ``after task 3``; ``task``: label of the request's experience."""
        return f"iteration {self.iteration} of task {task}" if self.when == "iteration" else f"{self.when} task {task}"


Requests = Mapping[int, Iterable[int] | UnlearningRequest] | Sequence[UnlearningRequest]


def with_unlearning(
    benchmark: CLScenario,
    requests: Requests = (),
    permanent: Iterable[int] = (),
    deadline: int | None = None,
) -> CLScenario:
    """Return a copy of a benchmark with unlearning requests on its train experiences; the original does not change.

    Each train experience gets ``requests`` (a tuple of :class:`UnlearningRequest` in firing order:
    before, by iteration, after), ``permanent`` (bool) and ``deadline`` (int or None). Requests of the given benchmark
    stay, and ``requests`` are added. Call this function last: streams that Avalanche derives from the result, such
    as those of ``benchmark_with_validation_stream``, have no requests.

    Args:
        benchmark: each train experience has exactly one task label.
        requests: ``{position: tasks}`` to unlearn tasks after the training at that position, with an
            :class:`UnlearningRequest` in the place of tasks for samples and classes; or a sequence of
            :class:`UnlearningRequest`; none by default.
        permanent: tasks that are permanent from the end of their training.
        deadline: a task becomes permanent by itself once this many further tasks have been trained; at
            least 1.

    Returns:
        A scenario with all streams and attributes of the given one.

    Raises:
        TypeError: for an object without streams.
        ValueError: a train experience without exactly one task label.
        RequestError: a request that names an unknown, not yet trained, already unlearned or permanent task,
            or a value that is not allowed; the message names event, task and rule. Also if the benchmark has requests
            already that conflict with ``requests``.
    """
    benchmark = _checked_benchmark(benchmark)
    tasks = _task_labels(benchmark)
    carried, given = [request for due in _own_requests(benchmark) for request in due], _as_list(requests, len(tasks))
    declared = _permanent_labels(permanent, tasks) | _permanent_tasks(benchmark)
    ledger = TaskLedger(deadline := _deadline(benchmark, deadline))
    ordered = sorted((*carried, *given), key=lambda one: (_FIRING_ORDER.index(one.when), one.iteration or 0))
    schedule = [tuple(request for request in ordered if request.at == position) for position in range(len(tasks))]
    try:
        for task, due in zip(tasks, schedule, strict=True):
            dry_run(ledger, task, due, tasks, permanent=task in declared)
        _check_parts(benchmark, schedule)
    except RequestError as error:
        there = ", ".join(f"{list(request.tasks)} at position {request.at}" for request in carried)
        if not there:
            raise
        raise RequestError(
            f"{error}. The benchmark carries requests already, {there}, and these come in addition: to begin again, "
            "give with_unlearning the benchmark without requests"
        ) from error
    return _with_schedule(benchmark, schedule, declared, deadline)


def check_part(request: UnlearningRequest, task: int, n: int, classes: Iterable[int], event: str) -> None:
    """Raise RequestError if a request for ``task`` names sample positions >= ``n``, or classes not in ``classes``."""
    if wrong := [at for at in request.samples if at >= n]:
        raise RequestError(f"{event}: task {task} has {n} samples, at positions 0 to {n - 1}, and none at {wrong}")
    if unknown := sorted(set(request.classes).difference(classes)):
        raise RequestError(
            f"{event}: task {task} has no samples of classes {unknown}; numbered in the task, it has {sorted(classes)}"
        )


def _check_parts(benchmark: CLScenario, schedule: Sequence[tuple[UnlearningRequest, ...]]) -> None:
    """Raise RequestError if a request in ``schedule`` names samples or classes that its task's data lacks."""
    for position, due in enumerate(schedule):
        for request in (one for one in due if one.is_partial):
            (task,) = request.tasks
            begin = max((at for at in range(position) if any(task in one.gone for one in schedule[at])), default=-1)
            parts = (e for e in benchmark.train_stream[begin + 1 : position + 1] if int(e.task_labels[0]) == task)
            labels = [label for part in parts for label in targets_of(part).tolist()]
            check_part(request, task, len(labels), set(labels), f"after position {position}")


def without_requests(benchmark: CLScenario) -> CLScenario:
    """Copy a benchmark, leaving out its unlearning requests and all experiences that train an unlearned task again."""
    benchmark = _checked_benchmark(benchmark)
    tasks, first, removed = _task_labels(benchmark), list[int](), set[int]()
    declared, ledger = _permanent_tasks(benchmark), TaskLedger(deadline := _deadline(benchmark, None))
    for position, (task, due) in enumerate(zip(tasks, _own_requests(benchmark), strict=True)):
        dry_run(ledger, task, due, tasks, permanent=task in declared)
        first += [position] if task not in removed else []
        removed |= set(ledger.unlearned)
    return _with_schedule(reorder(benchmark, first), [() for _ in first], declared, deadline)


def reorder(benchmark: CLScenario, positions: Sequence[int]) -> CLScenario:
    """Return a benchmark with only the train experiences at ``positions``, in this order, and the same test stream."""
    train = EagerCLStream("train", [copy_of(benchmark.train_stream[position]) for position in positions])
    return scenario_like(benchmark, [train, *(s for name, s in benchmark.streams.items() if name != "train")])


def join(parts: Sequence[Any]) -> Any:
    """Return one experience with the data of all ``parts`` of a task, in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    twin = copy_of(max(parts, key=lambda part: len(attribute_of(part, "original_classes", ()))))
    twin._dataset, twin.requests = concat_datasets([part.dataset for part in parts]), ()
    vars(twin).pop("classes_in_this_experience", None)  # those of one part
    return twin


def join_if(fingerprint: str, experiences: Sequence[Any]) -> Any:
    """Join consecutive experiences (parts of a task) whose labels have the hash ``fingerprint``; None if none match."""
    for start in range(len(experiences)):
        before = ""
        for end, part in enumerate(experiences[start:], start + 1):
            before = labels_fingerprint(part, before)
            if before == fingerprint:
                return join(experiences[start:end])
    return None


def without_positions(experience: Any, positions: Collection[int]) -> Any:
    """Return a copy of an experience without the samples at ``positions`` and without its unlearning requests.

    Attribute ``closed_classes`` of the copy: classes that lost all of their samples; their rows of the head stay, but
    are closed. Attribute ``left_out``: the positions. Labels do not change.
    """
    removed, labels, twin = frozenset(positions), targets_of(experience).tolist(), copy_of(experience)
    kept = [position for position in range(len(labels)) if position not in removed]
    samples = twin.samples if isinstance(twin, TaskExperience) else None
    if samples is None:
        twin._dataset = experience.dataset.subset(kept)
    else:
        twin.replace_samples(samples.subset(kept))
    if getattr(twin, "classes_in_this_experience", None) is None:  # the head is as wide as with all samples
        twin.classes_in_this_experience = sorted(set(labels))
    twin.closed_classes = tuple(sorted(set(labels) - {labels[position] for position in kept}))
    twin.left_out, twin.requests = tuple(sorted(removed)), ()
    return twin


def without_samples(benchmark: CLScenario, left_out: Mapping[int, Collection[int]]) -> CLScenario:
    """Return a copy of a benchmark without the training samples in ``left_out``; all else stays, also classes' labels.

    Args:
        benchmark: each train experience has exactly one task label.
        left_out: task → positions in its training data, from 0.

    Raises:
        ValueError: for a task that the benchmark does not have, or a position that its data does not have.
    """
    result = reorder(benchmark, range(len(benchmark.train_stream)))
    stream = list(result.train_stream)
    sizes = {int(e.task_labels[0]): len(e.dataset) for e in stream}
    for task, positions in left_out.items():
        wrong = [p for p in positions if task not in sizes or checks.integer(p) not in range(sizes[task])]
        if task not in sizes or wrong:
            raise ValueError(f"left_out: task {task!r} has no samples {wrong}; the tasks have so many: {sizes}")
    for experience in stream:
        if positions := left_out.get(int(experience.task_labels[0]), ()):
            requests = getattr(experience, "requests", ())
            vars(experience).update(vars(without_positions(experience, positions)) | {"requests": requests})
    return result


def tasks_after_each(stream: Iterable[Any]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (trained tasks, remaining tasks) after each experience with its requests, both ordered by last training."""
    trained: list[int] = []
    removed: set[int] = set()
    for experience in stream:
        task = int(experience.task_label)
        trained = [*(other for other in trained if other != task), task]
        removed.discard(task)
        removed |= {task for request in getattr(experience, "requests", ()) for task in request.gone}
        yield tuple(trained), tuple(task for task in trained if task not in removed)


def _with_schedule(
    benchmark: CLScenario,
    schedule: Sequence[tuple[UnlearningRequest, ...]],
    declared: frozenset[int],
    deadline: int | None,
) -> CLScenario:
    """Return a copy of a benchmark with requests (a tuple per experience), permanent (``declared``) tasks, deadline."""
    streams = [EagerCLStream(name, [copy_of(e) for e in stream]) for name, stream in benchmark.streams.items()]
    result = scenario_like(benchmark, streams)
    for stream in streams:
        stream.benchmark = result
        for experience in stream:
            if not isinstance(experience, TaskExperience):
                experience.benchmark = result
    for experience, due in zip(result.train_stream, schedule, strict=True):
        experience.requests = due
        experience.permanent = int(experience.task_labels[0]) in declared
        experience.deadline = deadline
    return result


def _own_requests(benchmark: CLScenario) -> list[tuple[UnlearningRequest, ...]]:
    """Return each train experience's unlearning requests, whose field ``at`` is set to the experience's position."""
    return [
        tuple(replace(request, at=position) for request in getattr(experience, "requests", ()))
        for position, experience in enumerate(benchmark.train_stream)
    ]


def _permanent_tasks(benchmark: CLScenario) -> frozenset[int]:
    stream = benchmark.train_stream
    return frozenset(int(experience.task_labels[0]) for experience in stream if getattr(experience, "permanent", False))


def _deadline(benchmark: CLScenario, given: int | None) -> int | None:
    """Return the deadline (tasks until one is permanent) of the benchmark or ``given``; RequestError if they differ."""
    given = TaskLedger(given).deadline
    deadlines = {getattr(experience, "deadline", None) for experience in benchmark.train_stream} - {None}
    carried = deadlines.pop() if deadlines else None
    if deadlines or (None not in (carried, given) and carried != given):
        raise RequestError(
            f"deadline={given!r}: the benchmark carries deadline={carried} already, and a run has one; leave deadline "
            "out to keep that, or give with_unlearning the benchmark without a deadline"
        )
    return given if carried is None else carried


def _checked_benchmark(benchmark: CLScenario) -> CLScenario:
    if not hasattr(benchmark, "streams"):
        raise TypeError(f"with_unlearning takes a benchmark, such as SplitDigits(), got {benchmark!r}")
    if "train" not in benchmark.streams:
        raise ValueError(f"The benchmark has no train stream; its streams are {', '.join(benchmark.streams)}")
    return labelled_benchmark(benchmark)


def _task_labels(benchmark: CLScenario) -> list[int]:
    tasks = []
    for position, experience in enumerate(benchmark.train_stream):
        labels = list(experience.task_labels)
        if len(labels) != 1:
            raise ValueError(
                f"train experience {position} has the task labels {labels}, where one is needed: make it with "
                "task_benchmark or Avalanche's task_incremental_benchmark"
            )
        tasks.append(int(labels[0]))
    return tasks


def _as_list(requests: Requests, n_positions: int) -> list[UnlearningRequest]:
    """Convert requests (a dict by position, or a sequence) to a list; RequestError for a wrong type or position."""
    if not isinstance(requests, Iterable):
        raise RequestError(f"{requests!r} are no requests; give a mapping {{position: tasks}}, such as {{2: [0]}}")
    given: list[Any] = (
        [
            replace(tasks, at=at) if isinstance(tasks, UnlearningRequest) else UnlearningRequest(tasks, at)  # type: ignore[arg-type]
            for at, tasks in requests.items()
            if not (isinstance(tasks, list) and not tasks)
        ]
        if isinstance(requests, Mapping)
        else list(requests)
    )
    for position, request in enumerate(given):
        if not isinstance(request, UnlearningRequest):
            raise RequestError(f"{request!r} is no UnlearningRequest; give {{position: tasks}} or a list of requests")
        at = n_positions - 1 if request.at is None else request.at
        if any(isinstance(task, UnlearningRequest) for task in request.tasks):
            raise RequestError(f"requests listed at position {at}: give {{{at}: …}} or [UnlearningRequest(…, at={at})]")
        given[position] = replace(request, at=at)
        if at >= n_positions:
            raise RequestError(f"at={at} is no position in the train stream; allowed are 0 to {n_positions - 1}")
    return given


def _permanent_labels(permanent: Iterable[int], tasks: Sequence[int]) -> frozenset[int]:
    labels = checks.integers("permanent", permanent, "task labels", RequestError)
    if unknown := [task for task in labels if task not in tasks]:
        there = ", ".join(map(str, sorted(set(tasks))))
        raise RequestError(f"permanent={list(labels)}: task {unknown[0]} is unknown; the stream trains tasks {there}")
    return frozenset(labels)


def dry_run(
    ledger: TaskLedger, task: int, due: Iterable[UnlearningRequest], known: Sequence[int], *, permanent: bool
) -> None:
    """Simulate a task's training and its requests ``due`` on ``ledger`` alone; RequestError for an invalid request."""
    due = tuple(due)
    for request in due:
        if request.when == "iteration" and task in request.tasks:
            raise RequestError(f"{request.event(task)}: task {task} is in training: request it with when='after'")
        if request.when != "after":
            ledger.forget(request.tasks, request.event(task), known)
    if task not in ledger.remaining:  # else the data are a further part of it
        ledger.learn(task)
    ledger.declare_permanent([task] if permanent else [])
    for request in due:
        if request.when == "after":
            enter = ledger.check if request.is_partial else ledger.forget
            enter(request.tasks, request.event(task), known)
