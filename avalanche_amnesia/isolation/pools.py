"""Isolation by pools: which units a task may take and read, so that unlearning it is exact.

Every layer is cut into as many equal pools as there are *slots*. A task that may still be unlearned trains units of its
own slot's pool, and reads nothing but those and the units of tasks that can never be unlearned. Which slot that is, and
which tasks those are, follows from the stream and never from which other tasks were trained: so a training is the
same, to the bit, as in a run that never saw the tasks unlearned before or after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.models.gate import UnitAllocation
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy

if TYPE_CHECKING:  # units and weights are dealt alike: whoever needs one kind of model loads no other
    from avalanche_amnesia.models.disjoint import DisjointModel, Share
    from avalanche_amnesia.models.masked import MaskedModel

WhenFull = Literal["error", "share"]


class CapacityError(ValueError):
    """A task finds no pool of its own; nothing changed."""


class CapacityWarning(RuntimeWarning):
    """A task to come will find no pool of its own."""


@dataclass(frozen=True)
class Pools:
    """Isolation by pools, which makes unlearning exact to the bit: ``isolation=Pools(…)``.

    HAT's strategies deal units out. Every layer is cut into equal pools, one per slot. A task trains units of its own
    slot's pool and reads only those and the units of tasks that are permanent by the stream, or past its deadline.
    Those of ``mark_permanent`` are protected, but not read: nothing in the stream tells a retrained model when it was
    called. Parameters that belong to no unit keep their values.
    :class:`~avalanche_amnesia.training.DisjointSubnets` deals weights out by the same slots.

    Args:
        slots: number of pools, by default one per task of the stream; or the slot of every task by its label,
            ``{0: 0, 1: 1, 2: 0}``, counted from 0. Tasks that the stream declares permanent have their slots' pools in
            common. A task's slot is its label modulo ``slots`` where that is a number, and by default the rank of its
            label in the stream. :meth:`planned` deals as few slots as the stream's requests allow.
        when_full: what becomes of a task that finds no slot: ``error``, or ``share`` the pool of a task that may still
            be unlearned as HAT does, after which records of unlearning these tasks say ``approximate``; weights can't
            be shared so.

    Raises:
        ValueError: for a value that is not allowed.
    """

    slots: int | Mapping[int, int] | None = None
    when_full: WhenFull = "error"

    def __post_init__(self) -> None:
        if isinstance(self.slots, Mapping):
            object.__setattr__(self, "slots", _checked(self.slots))
        elif self.slots is not None:
            object.__setattr__(self, "slots", checks.whole_number("slots", self.slots))
        checks.one_of("when_full", self.when_full, WhenFull)

    @classmethod
    def planned(cls, benchmark: Any, *, when_full: WhenFull = "error") -> Self:
        """Pools in as few slots as a stream needs whose requests are known: a slot is free again once its task is gone.

        The fewer slots, the more units a task has. The slots follow from the stream's requests and not from what is
        trained or unlearned, so that a model that never saw a task has them too. A request that is not obeyed leaves
        its slot taken.

        Args:
            benchmark: its train stream carries the requests
                (:func:`~avalanche_amnesia.benchmarks.with_unlearning`).
            when_full: as for the class.
        """
        if not hasattr(benchmark, "train_stream"):
            raise TypeError(f"Pools.planned takes the benchmark that the strategy is trained on, got {benchmark!r}")
        stream = list(benchmark.train_stream)
        return cls(planned_slots(stream, departures(stream)), when_full)

    def allocate(self, strategy: Strategy, model: MaskedModel, task: int, min_units: int) -> UnitAllocation:
        """Units of a task whose training begins: those of its slot, and those that it may read.

        Raises:
            CapacityError: if it finds fewer than ``min_units`` free in a layer; nothing changed.
        """
        layout = self._layout(strategy)
        allocation = allocation_of(task, model, layout, min_units=min_units, when_full=self.when_full)
        if not model.masks and self.when_full == "error":
            _warn_if_crowded(layout, strategy.experience, CHOICES)
        return allocation

    def share(self, strategy: Strategy, model: DisjointModel, task: int, seed: int) -> Share:
        """Share of a task whose training begins, in the partition of a seed, and the tasks whose shares it may read.

        Raises:
            CapacityError: if its share is another task's; nothing changed.
        """
        from avalanche_amnesia.models.disjoint import Share  # lazy: who deals units needs nothing of it

        layout = self._layout(strategy)
        shares = {other: share for other in model.tasks if (share := model.share(other)) is not None}
        reads = tuple(sorted(other for other in shares if layout.is_open(other, task)))
        held = seed if -(2**63) <= seed < 2**63 else derive_seed(seed, "partition")  # a share is kept as int64
        found = Share(held, layout.slots, layout.slot(task), reads)
        taken = sorted(other for other, share in shares.items() if share.overlaps(found))
        if taken:
            raise CapacityError(
                f"task {task} finds its share (slot {found.slot} of {found.slots}) taken by tasks {taken}: {MORE_SLOTS}"
            )
        if not shares and self.when_full == "error":
            _warn_if_crowded(layout, strategy.experience, MORE_SLOTS)
        return found

    def _layout(self, strategy: Strategy) -> StreamLayout:
        """The layout of the stream that a strategy trains a task of."""
        # Tasks past the deadline are open because the ledger allows no request for them any more: its deadline counts,
        # which a user may have set to another number than the stream's.
        ledgers = (getattr(plugin, "ledger", None) for plugin in strategy.plugins)
        ledger = next((found for found in ledgers if isinstance(found, TaskLedger)), None)
        deadline = getattr(strategy.experience, "deadline", None) if ledger is None else ledger.deadline
        layout = StreamLayout.of(strategy.experience, self.slots, deadline)
        task = int(strategy.experience.task_labels[0])
        if ledger is None or task not in ledger.remaining:
            return layout
        # Trained again, it reads what it read at first: nothing of tasks that came later.
        return replace(layout, later=frozenset(ledger.remaining[ledger.remaining.index(task) :]))


@dataclass(frozen=True)
class StreamLayout:
    """Layout of a stream's tasks over slots, whichever of them a run trains."""

    tasks: tuple[int, ...]
    permanent: frozenset[int]
    deadline: int | None
    given: int | Mapping[int, int] | None = None
    later: frozenset[int] = frozenset()

    @classmethod
    def of(cls, experience: Any, given: int | Mapping[int, int] | None, deadline: int | None) -> StreamLayout:
        """Read an experience's stream; only the experience, where it belongs to none."""
        stream = _stream_of(experience)
        tasks = tuple(int(label) for e in stream for label in e.task_labels)
        permanent = frozenset(int(e.task_labels[0]) for e in stream if getattr(e, "permanent", False))
        return cls(tasks, permanent, deadline, given)

    @property
    def slots(self) -> int:
        """Pools that every layer is cut into."""
        if isinstance(self.given, Mapping):
            return max(self.given.values()) + 1
        return len(self.tasks) if self.given is None else self.given

    def slot(self, task: int) -> int:
        """The slot of a task."""
        if isinstance(self.given, Mapping):
            if task not in self.given:
                raise CapacityError(f"task {task} has no slot: Pools(slots=…) names those of {sorted(self.given)}")
            return self.given[task]
        return sorted(self.tasks).index(task) if self.given is None else task % self.given

    def slots_of(self, task: int) -> frozenset[int]:
        """Slots whose pools a task may take: its own; tasks that are permanent from the start have theirs in common."""
        return frozenset(map(self.slot, self.permanent if task in self.permanent else [task]))

    def is_open(self, task: int, to: int) -> bool:
        """Tell whether the units of a task trained before may be read by another one.

        They may where it is permanent by the stream, or further back in the stream than the deadline: a run that
        never saw the tasks between has the same answer.
        """
        if task not in self.tasks or to not in self.tasks or task in self.later:
            return False
        if task in self.permanent:
            return True
        before = self.tasks[: self.tasks.index(to)]
        distance = before[::-1].index(task) + 1 if task in before else 0  # from its last training: it may come again
        return self.deadline is not None and distance > self.deadline


def _stream_of(experience: Any) -> list[Any]:
    """All of an experience's stream, though a run may train only some: a retrained model must find the same slots."""
    return list(getattr(experience, "origin_stream", None) or [experience])


# Slots by the stream's requests ------------------------------------------------------------------------------------


def departures(stream: Sequence[Any]) -> dict[int, int]:
    """Position of the last training beside which a task is there, for the tasks that a stream requests to unlearn."""
    gone: dict[int, int] = {}
    for position, experience in enumerate(stream):
        requests = getattr(experience, "requests", ())
        for request in (r for r in requests if r.when == "before"):
            gone |= dict.fromkeys(request.gone, position - 1)
        for task in experience.task_labels:
            gone.pop(int(task), None)  # learned again
        for request in (r for r in requests if r.when != "before"):
            gone |= dict.fromkeys(request.gone, position)
    return gone


def planned_slots(stream: Sequence[Any], gone: Mapping[int, int]) -> dict[int, int]:
    """Slots of a stream's tasks, as few as their stays allow: each takes the first one that is free when it comes.

    Tasks that the stream declares permanent have all of their slots in common from the first of them on: nobody else
    ever takes one of these. A task that comes again was there all the while, and has the same slot.
    """
    slots: dict[int, int] = {}
    until: list[int] = []  # of each slot, the last training beside which it is taken
    for position, experience in enumerate(stream):
        for task in map(int, experience.task_labels):
            if task in slots:
                continue
            permanent = getattr(experience, "permanent", False)
            free = (number for number, taken in enumerate(until) if taken < position and not permanent)
            slots[task] = next(free, len(until))
            until[slots[task] : slots[task] + 1] = [gone.get(task, len(stream))]
    return slots


def _warn_if_crowded(layout: StreamLayout, experience: Any, choices: str) -> None:
    """Warn, before the first task, of the first one in the stream that will find no pool of its own."""
    gone = departures(_stream_of(experience))
    for position, task in enumerate(layout.tasks):
        if task in layout.permanent:  # these share what they have
            continue
        others = (other for other in dict.fromkeys(layout.tasks[:position]) if other != task)
        there = [
            other
            for other in others
            if gone.get(other, position) >= position and layout.slots_of(other) & layout.slots_of(task)
        ]
        if not there:
            continue
        late = [other for other in there if layout.is_open(other, task)]
        why = f", of which {late} can't be unlearned any more by then" if late else ""
        text = (
            f"task {task} will find one of the {layout.slots} slots taken by tasks {there}{why}, unless they are "
            f"unlearned in time; the stream requests no more. {choices[0].upper()}{choices[1:]}. "
            "Pools.planned(benchmark) deals slots by the stream's requests"
        )
        warnings.warn(text, CapacityWarning, stacklevel=3)
        return


# Units of a slot ---------------------------------------------------------------------------------------------------


def pool(sizes: Sequence[int], slots: int, chosen: frozenset[int]) -> Tensor:
    """Units of some slots' pools, bool ``(n_units,)``.

    Pools are runs of neighbouring units, of the same share in every layer: so the groups of grouped convolutions, the
    heads of an attention and the channels of a residual stream fall into the same pool in all layers of one width.
    """
    wanted = torch.zeros(slots, dtype=torch.bool)
    wanted[sorted(chosen)] = True
    # Unit u lies in pool u·slots // size: what a width leaves over is spread, so that pools differ by one unit at most.
    return torch.cat([wanted[torch.arange(size) * slots // size] for size in sizes])


def allocation_of(
    task: int, model: MaskedModel, layout: StreamLayout, *, min_units: int, when_full: WhenFull
) -> UnitAllocation:
    """The units that a task may use in the slot that its label names."""
    slots, widths = layout.slots, {name: layer.units for name, layer in model.graph.layers.items()}
    too_few = {name: units for name, units in widths.items() if units // slots < min_units}
    if too_few:
        raise CapacityError(
            f"{slots} slots need at least {slots * min_units} units in every layer (min_units={min_units} each), but "
            f"layers have fewer: {too_few}; widen them, or give Pools(slots=…) a smaller number"
        )
    wanted = pool(list(widths.values()), slots, layout.slots_of(task)).to(model.cumulative_mask().device)
    open_tasks = frozenset(other for other in model.masks if layout.is_open(other, task))
    readable = model.cumulative_mask(open_tasks)
    free = wanted & ~readable
    sharing = frozenset(
        other for other in model.masks if other not in open_tasks and bool((model.binary_mask(other) & free).any())
    )
    if sharing and when_full == "error":
        raise CapacityError(
            f"task {task} finds its pool (slot {sorted(layout.slots_of(task))} of {layout.slots}) taken by tasks "
            f"{sorted(sharing)}, which may still be unlearned: {CHOICES}"
        )
    # With tasks in its slot it shares as in HAT: it may read all their units, and takes those that are left.
    # Tasks that are permanent from the start share freely with each other: a full region is still readable.
    taken = model.cumulative_mask(sharing)
    own, permanent = free & ~taken, task in layout.permanent
    # What is still missing here lies with tasks whose units it may read, and must leave as they are.
    narrow = [name for name, part in model.by_layer(own).items() if int(part.sum()) < min_units]
    if narrow and when_full == "error" and not permanent:
        holders = sorted(other for other in open_tasks if bool((model.binary_mask(other) & wanted).any()))
        raise CapacityError(
            f"task {task} finds fewer than {min_units} free units in layers {narrow} of its pool (slot "
            f"{sorted(layout.slots_of(task))} of {layout.slots}), which tasks {holders} keep for good: {CHOICES}"
        )
    return UnitAllocation(own, readable | taken, open_tasks, sharing, permanent)


MORE_SLOTS = "unlearn what can be first, or give Pools(slots=…) a larger number from the beginning"
CHOICES = f"{MORE_SLOTS}, or allow when_full='share', with which tasks in one pool are unlearned approximately"


def _checked(slots: Mapping[int, int]) -> dict[int, int]:
    """Slots by task label."""
    pairs = {checks.integer(task): checks.integer(slot) for task, slot in slots.items()}
    checked = {t: s for t, s in pairs.items() if t is not None and s is not None and min(t, s) >= 0}
    if not checked or len(checked) < len(slots):
        raise ValueError(f"slots must name a slot from 0 on for task labels, {{0: 0, 1: 1, 2: 0}}; got {dict(slots)!r}")
    return checked
