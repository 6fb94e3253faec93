"""Isolation by pools: which units a task may take and read, so that unlearning it is exact.

Every layer is cut into as many equal pools as there are *slots*. A task that may still be unlearned trains units of its
own slot's pool, and reads nothing but those and the units of tasks that can never be unlearned. Which slot that is, and
which tasks those are, follows from the stream alone and never from which other tasks were trained: so a training is the
same, to the bit, as in a run that never saw the tasks unlearned before or after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.training.update_rules import TaskUse

Isolation = Literal["none", "pools"]
WhenFull = Literal["error", "share"]
Placement = Literal["free", "label"]

_ENTRYWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


class CapacityError(ValueError):
    """A task finds no pool of its own; nothing changed."""


@dataclass(frozen=True)
class StreamLayout:
    """What a stream says of its tasks, whichever of them a run trains.

    Attributes:
        tasks: task labels, in the order of the stream.
        permanent: those that are permanent from their training on.
        deadline: further tasks after which a task becomes permanent; None: never.
        slots: pools that every layer is cut into.
        explicit: whether the user gave ``slots``.
    """

    tasks: tuple[int, ...]
    permanent: frozenset[int]
    deadline: int | None
    slots: int
    explicit: bool

    @classmethod
    def of(cls, experience: Any, slots: int | None, deadline: int | None) -> StreamLayout:
        """Read an experience's stream; the experience alone, where it belongs to none."""
        stream = list(getattr(experience, "origin_stream", None) or [experience])
        tasks = tuple(int(label) for e in stream for label in e.task_labels)
        permanent = frozenset(int(e.task_labels[0]) for e in stream if getattr(e, "permanent", False))
        return cls(tasks, permanent, deadline, len(tasks) if slots is None else slots, slots is not None)

    def slot(self, task: int) -> int:
        """The slot of a task: its label modulo ``slots`` where the user gave that, its rank among the labels else."""
        return task % self.slots if self.explicit else sorted(self.tasks).index(task)

    def slots_of(self, task: int) -> frozenset[int]:
        """Slots whose pools a task may take: its own; tasks that are permanent from the start have theirs in common."""
        return frozenset(map(self.slot, self.permanent if task in self.permanent else [task]))

    def is_open(self, task: int, to: int) -> bool:
        """Whether the units of a task trained before may be read by another one.

        They may where it is permanent by the stream, or further back in the stream than the deadline: a run that
        never saw the tasks between has the same answer.
        """
        if task not in self.tasks or to not in self.tasks:
            return False
        distance = self.tasks.index(to) - self.tasks.index(task)
        return task in self.permanent or (self.deadline is not None and distance > self.deadline)


@dataclass(frozen=True)
class Plot:
    """The units that one task may use.

    Attributes:
        own: those that it may take, bool ``(n_units,)``.
        readable: those of the tasks that it may read, bool ``(n_units,)``.
        open_tasks: those tasks.
        neighbours: remaining tasks that it has to share its pool with.
        permanent: whether it is permanent from the start, so that what it adjusts is never to be taken back.
        crowding: tasks without which it would have another pool.
    """

    own: Tensor
    readable: Tensor
    open_tasks: frozenset[int]
    neighbours: frozenset[int]
    permanent: bool
    crowding: frozenset[int] = frozenset()

    @property
    def allowed(self) -> Tensor:
        """Units that its mask may open, bool ``(n_units,)``."""
        return self.own | self.readable

    @property
    def saw(self) -> frozenset[int]:
        """The tasks that can leave a trace in its training."""
        return self.open_tasks | self.neighbours | self.crowding


def pool(sizes: Sequence[int], slots: int, chosen: frozenset[int]) -> Tensor:
    """Units of some slots' pools, bool ``(n_units,)``.

    Pools are runs of neighbouring units, of the same share in every layer: so the groups of grouped convolutions, the
    heads of an attention and the channels of a residual stream fall into the same pool in all layers of one width.

    Args:
        sizes: units of each layer.
        slots: pools per layer.
        chosen: slots.
    """
    wanted = torch.zeros(slots, dtype=torch.bool)
    wanted[sorted(chosen)] = True
    return torch.cat([wanted[torch.arange(size) * slots // size] for size in sizes])


def opened_to(task: int, model: MaskedModel, layout: StreamLayout) -> frozenset[int]:
    """The remaining tasks whose units a task may read."""
    return frozenset(other for other in model.masks if layout.is_open(other, task))


def plot_of(
    task: int, model: MaskedModel, layout: StreamLayout, *, min_units: int, when_full: WhenFull, reason: str = ""
) -> Plot:
    """The units that a task may use in the slot that its label names.

    Args:
        task: the task that is to be trained.
        model: its masks are those of the remaining tasks.
        layout: of the stream.
        min_units: that a task must find free in every layer.
        when_full: ``error``, or ``share``: a task without a free pool shares its slot's with the tasks in it.
        reason: why the task can't have any other slot, for the error.

    Raises:
        CapacityError: if the layers are too narrow for so many slots, or the task's pool is taken.
    """
    check_widths(model, layout.slots, min_units)
    ground = pool([layer.units for layer in model.graph.layers.values()], layout.slots, layout.slots_of(task))
    ground = ground.to(model.cumulative_mask().device)
    plot = plot_on(ground, task, model, layout)
    bound = f". Slots follow from labels here: {reason}" if reason else ""
    if plot.neighbours and when_full == "error":
        raise CapacityError(
            f"task {task} finds its pool (slot {sorted(layout.slots_of(task))} of {layout.slots}) taken by tasks "
            f"{sorted(plot.neighbours)}, which may still be unlearned: {CHOICES}{bound}"
        )
    narrow = [name for name, part in model.by_layer(plot.own).items() if int(part.sum()) < min_units]
    if narrow and when_full == "error" and not plot.permanent:
        holders = sorted(other for other in plot.open_tasks if bool((model.binary_mask(other) & ground).any()))
        raise CapacityError(
            f"task {task} finds fewer than {min_units} free units in layers {narrow} of its pool (slot "
            f"{sorted(layout.slots_of(task))} of {layout.slots}), which tasks {holders} keep for good: {CHOICES}{bound}"
        )
    return plot


def plot_on(
    ground: Tensor, task: int, model: MaskedModel, layout: StreamLayout, crowding: frozenset[int] = frozenset()
) -> Plot:
    """The units that a task may use, from those among which it may take some.

    Args:
        ground: bool ``(n_units,)``; the task takes those of them that nobody holds.
        task: the task that is to be trained.
        model: its masks are those of the remaining tasks.
        layout: of the stream.
        crowding: tasks without which it would have another ground.
    """
    open_tasks = opened_to(task, model, layout)
    readable = _union(model, open_tasks)
    free = ground & ~readable
    neighbours = frozenset(
        other for other in model.masks if other not in open_tasks and bool((model.binary_mask(other) & free).any())
    )
    taken = _union(model, neighbours)
    # Tasks that are permanent from the start share freely with each other: a full region is still readable.
    return Plot(free & ~taken, readable | taken, open_tasks, neighbours, task in layout.permanent, crowding)


CHOICES = (
    "unlearn what can be first, give slots= a larger number from the beginning, or allow when_full='share', with which "
    "tasks in one pool are unlearned approximately"
)


def check_widths(model: MaskedModel, slots: int, min_units: int) -> None:
    """Raise :class:`CapacityError` unless every layer has the units for so many slots."""
    narrow = {name: layer.units for name, layer in model.graph.layers.items() if layer.units // slots < min_units}
    if narrow:
        raise CapacityError(
            f"{slots} slots need at least {slots * min_units} units in every layer (min_units={min_units} each), but "
            f"layers have fewer: {narrow}; widen them, or give slots= a smaller number"
        )


def _union(model: MaskedModel, tasks: frozenset[int]) -> Tensor:
    nothing = torch.zeros_like(model.cumulative_mask())
    return torch.stack([nothing, *map(model.binary_mask, sorted(tasks))]).any(0)


def use_within(model: MaskedModel, plot: Plot) -> TaskUse:
    """What a task meets in its plot: only entries that nobody else can read are free.

    Tasks that are permanent from the start may adjust what permanent tasks use, as the rule says; any other task
    leaves it as it is.
    """
    use = TaskUse(model, plot.saw)
    use.in_use = ~plot.own
    parameters = dict(model.backbone.named_parameters())
    fixed = {}
    for name, mine in model.graph.entries_within(plot.own).items():
        adjustable = (use.covered[name] > 0) & plot.permanent
        fixed[name] = (~mine & ~adjustable).to(parameters[name].dtype).contiguous()
    use.fixed = fixed
    return use


def is_entrywise(optimizer: Optimizer) -> bool:
    """Whether an optimizer moves every entry by that entry's own gradients alone, whatever the others hold."""
    return type(optimizer) in _ENTRYWISE
