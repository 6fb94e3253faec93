"""Weight pools: rules for the weights that a task trains and uses, so that unlearning is exact.

A task that may be unlearned trains only the weights of its own slot. It uses only these weights and those of permanent
tasks. Slots and usable tasks depend only on the stream, not on the tasks trained so far. So every training is
bit-identical to the same training in a run that never saw the unlearned tasks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from avalanche_amnesia import checks
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy

if TYPE_CHECKING:
    from avalanche_amnesia.models.disjoint import Allocation, DisjointModel


class CapacityError(ValueError):
    """Error if a task has no slot (part of the weights), or if another task uses its slot; raised before any change."""


class CapacityWarning(RuntimeWarning):
    """Warning that a later task will find its slot (part of the weights) occupied by another task."""


@dataclass(frozen=True)
class Pools:
    """Division of the weights into slots, one for each task of :class:`~avalanche_amnesia.training.DisjointSubnets`.

    A random partition splits the weights of every layer into one share per slot. A task trains its own slot's share. It
    also uses the shares of tasks that the stream declares permanent, and of tasks past their deadline. It does not use
    tasks that became permanent during the run by ``mark_permanent``, because a retrained model can't know when that
    happened.

    Args:
        slots: number of slots, by default one per task of the stream; or the slot of every task by its label,
            ``{0: 0, 1: 1, 2: 0}``, counted from 0. With a number the slot of a task is its label modulo ``slots``; by
            default it is the rank of the label in the stream. :meth:`planned` uses as few slots as the requests of the
            stream allow.

    Raises:
        ValueError: for an invalid value.
    """

    slots: int | Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.slots, Mapping):
            object.__setattr__(self, "slots", _checked_slots(self.slots))
        elif self.slots is not None:
            object.__setattr__(self, "slots", checks.whole_number("slots", self.slots))

    @classmethod
    def planned(cls, benchmark: Any) -> Self:
        """Return pools with few slots (parts of the weights): a slot is reused once its task has been unlearned.

        A task gets the first slot that is free when its training begins; a permanent one gets a new slot, which no
        other task gets. A slot is free again when its task is unlearned. With fewer slots each task has more weights.
        The slots depend only on the stream's requests, so a model that never saw a task has the same slots. If a
        request is not carried out, the slot stays occupied. A task keeps its slot when trained again.

        Args:
            benchmark: a benchmark with the requests in its train stream
                (:func:`~avalanche_amnesia.benchmarks.with_unlearning`).
        """
        if not hasattr(benchmark, "train_stream"):
            raise TypeError(f"Pools.planned takes the benchmark that the strategy is trained on, got {benchmark!r}")
        stream = list(benchmark.train_stream)
        removals, slots = removal_positions(stream), dict[int, int]()
        until: list[int] = []  # for each slot, index of the last training during which it is occupied
        for position, experience in enumerate(stream):
            permanent = getattr(experience, "permanent", False)
            for task in (task for task in map(int, experience.task_labels) if task not in slots):
                free = (number for number, taken in enumerate(until) if taken < position and not permanent)
                slots[task] = next(free, len(until))
                until[slots[task] : slots[task] + 1] = [removals.get(task, len(stream))]
        return cls(slots)

    def share(self, strategy: Strategy, model: DisjointModel, task: int, seed: int) -> Allocation:
        """Return a new task's :class:`Allocation`: its own weights, and the earlier tasks with weights that it may use.

        Raises:
            CapacityError: if another task occupies the share; nothing changed.
        """
        from avalanche_amnesia.models.disjoint import Allocation  # lazy: a circular import

        layout = self._layout(strategy)
        shares = {other: share for other in model.tasks if (share := model.share(other)) is not None}
        reads = tuple(sorted(other for other in shares if layout.can_be_read(other, task)))
        held = seed if -(2**63) <= seed < 2**63 else derive_seed(seed, "partition")  # a share is stored as int64
        found = Allocation(held, layout.slots, layout.slot(task), reads)
        if taken := sorted(other for other, share in shares.items() if share.overlaps(found)):
            now = layout.tasks.index(task)
            planned = [other for other in taken if layout.removals.get(other, now) < now]
            why = f", though the stream requests to unlearn {planned} before, which was not done" if planned else ""
            raise CapacityError(
                f"task {task}: slot {found.slot} of {found.slots} is taken by tasks {taken}{why}: {MORE_SLOTS}"
            )
        if not shares:
            _warn_if_crowded(layout)
        return found

    def _layout(self, strategy: Strategy) -> StreamLayout:
        """Return the slots (parts of the weights) of all tasks in the strategy's current stream."""
        # The ledger's deadline takes precedence: the user may have set one that differs from the stream's.
        ledgers = (getattr(plugin, "ledger", None) for plugin in strategy.plugins)
        ledger = next((found for found in ledgers if isinstance(found, TaskLedger)), None)
        deadline = getattr(strategy.experience, "deadline", None) if ledger is None else ledger.deadline
        layout = StreamLayout.make(strategy.experience, self.slots, deadline)
        task = int(strategy.experience.task_labels[0])
        if ledger is None or task not in ledger.remaining:
            return layout
        # A task trained again uses the weights of the same tasks as the first time, so those of no later task.
        return replace(layout, later=frozenset(ledger.remaining[ledger.remaining.index(task) :]))


@dataclass(frozen=True)
class StreamLayout:
    """Slots (parts of the weights) of all tasks of a stream, and the rule for using the weights of earlier tasks."""

    tasks: tuple[int, ...]
    permanent: frozenset[int]
    removals: Mapping[int, int]  # as :func:`removal_positions` returns it
    deadline: int | None
    given: int | Mapping[int, int] | None = None
    later: frozenset[int] = frozenset()

    @classmethod
    def make(cls, experience: Any, given: int | Mapping[int, int] | None, deadline: int | None) -> StreamLayout:
        """Return the layout (each task's slot) of an experience's stream, or of the experience alone if it has none."""
        stream = list(getattr(experience, "origin_stream", None) or [experience])  # also what a retrained model skips
        tasks = tuple(int(label) for e in stream for label in e.task_labels)
        permanent = frozenset(int(e.task_labels[0]) for e in stream if getattr(e, "permanent", False))
        return cls(tasks, permanent, removal_positions(stream), deadline, given)

    @property
    def slots(self) -> int:
        """Return the number of slots, the parts into which the network's weights are divided."""
        if isinstance(self.given, Mapping):
            return max(self.given.values()) + 1
        return len(self.tasks) if self.given is None else self.given

    def slot(self, task: int) -> int:
        """Return the slot number of a task; raise CapacityError if the task has no slot (part of the weights)."""
        if isinstance(self.given, Mapping):
            if task not in self.given:
                raise CapacityError(f"task {task} has no slot: Pools(slots=…) names those of {sorted(self.given)}")
            return self.given[task]
        return sorted(self.tasks).index(task) if self.given is None else task % self.given

    def can_be_read(self, task: int, later: int) -> bool:
        """Return True if ``later``, a task trained after ``task``, may use the weights of ``task``.

        It may if the stream declares the earlier task permanent, or if that task is further back in the stream than the
        deadline. The answer is the same in a run that never saw the tasks between.
        """
        if task not in self.tasks or later not in self.tasks or task in self.later:
            return False
        if task in self.permanent:
            return True
        before = self.tasks[: self.tasks.index(later)]
        distance = before[::-1].index(task) + 1 if task in before else 0  # from its last training in the stream
        return self.deadline is not None and distance > self.deadline


# Slots by the stream's requests ------------------------------------------------------------------------------------


def removal_positions(stream: Sequence[Any]) -> dict[int, int]:
    """Return, for each task that the stream will unlearn, the index of the last experience before its removal."""
    removals: dict[int, int] = {}
    for position, experience in enumerate(stream):
        requests = getattr(experience, "requests", ())
        for request in (r for r in requests if r.when == "before"):
            removals |= dict.fromkeys(request.gone, position - 1)
        for task in experience.task_labels:
            removals.pop(int(task), None)  # trained again
        for request in (r for r in requests if r.when != "before"):
            removals |= dict.fromkeys(request.gone, position)
    return removals


def _warn_if_crowded(layout: StreamLayout) -> None:
    """Warn if a later task of the stream will find its slot (part of the weights) occupied by another task."""
    for position, task in enumerate(layout.tasks):
        remaining = (t for t in dict.fromkeys(layout.tasks[:position]) if layout.removals.get(t, position) >= position)
        there = [other for other in remaining if other != task and layout.slot(other) == layout.slot(task)]
        if not there:
            continue
        late = [other for other in there if layout.can_be_read(other, task)]
        why = f", of which {late} can't be unlearned any more by then" if late else ""
        text = (
            f"task {task} will find its slot ({layout.slot(task)} of {layout.slots}) taken by tasks {there}{why}: "
            f"{MORE_SLOTS}, or choose slots by the stream's requests, Pools.planned(benchmark)"
        )
        warnings.warn(text, CapacityWarning, stacklevel=3)
        return


MORE_SLOTS = "unlearn what can be first, or give Pools(slots=…) a larger number from the beginning"


def _checked_slots(slots: Mapping[int, int]) -> dict[int, int]:
    """Return ``slots``, a mapping of task label to slot, as ints; raise ValueError unless all are at least 0."""
    pairs = {checks.integer(task): checks.integer(slot) for task, slot in slots.items()}
    checked = {t: s for t, s in pairs.items() if t is not None and s is not None and min(t, s) >= 0}
    if not checked or len(checked) < len(slots):
        raise ValueError(f"slots must name a slot from 0 on for task labels, {{0: 0, 1: 1, 2: 0}}; got {dict(slots)!r}")
    return checked
