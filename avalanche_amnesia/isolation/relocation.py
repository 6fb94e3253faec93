"""Pools that move: a task fits wherever a slot is free, and the place it got does not show in its bits.

Between trainings the tasks' slots lie in the order of their training, without gaps: where a model lies that never saw
the tasks that are gone. While a task trains, its own slot comes first, the slots that it may read come next, and those
of all others, whose units it has closed, behind them: so every sum is taken in the order in which that model takes it.
And what a task starts from is taken from the initial values of its *initial slot*, which follows from its label.

What a remaining task covers moves with its slot. Everything else holds its initial value: of its place between
trainings, of the initial slots of the tasks around it while one of them trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from avalanche_amnesia.isolation.pools import CHOICES, CapacityError, StreamLayout, WhenFull
from avalanche_amnesia.isolation.slots import SlotTables, gathered, own_tensors
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.saving.classes import saveable
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction


@saveable
@dataclass(frozen=True)
class HeldSlot:
    """A slot that is in use."""

    initial_slot: int
    tasks: tuple[int, ...]


@saveable
@dataclass(frozen=True)
class FreeUnits:
    """Units among which a task may take some."""

    units: Tensor
    blocking_tasks: frozenset[int] = frozenset()


@runtime_checkable
class KeptTensors(Protocol):
    """A plugin that keeps tensors like the model's, as these lie between trainings."""

    def move_units(self, moved: Callable[[str, Tensor], Tensor], change: Transaction) -> None:
        """Follow units that move."""


@dataclass(frozen=True)
class Tensors:
    """Everything laid out by units that a task in training has beside the model."""

    snapshot: Mapping[str, Tensor]
    optimizer: Optimizer | None = None
    heads: KeptTensors | None = None

    def values(self, model: MaskedModel) -> list[tuple[str, Tensor]]:
        """The model's tensors and the snapshot's, by the names that they have there."""
        found = (*model.named_parameters(), *model.named_buffers(), *self.snapshot.items())
        return [(name, value.detach()) for name, value in found]

    def followers(self, model: MaskedModel) -> list[tuple[str, Tensor]]:
        """Tensors without values of their own where nothing was learned, by the names of those that they follow."""
        found = [] if model.allowed is None else [("embedding", model.allowed)]
        states = {} if self.optimizer is None else self.optimizer.state
        for name, parameter in model.named_parameters():
            state = states.get(parameter, {}).values()
            found += [(name, v) for v in state if isinstance(v, Tensor) and v.shape == parameter.shape]
        return found


@saveable
class Relocation:
    """Slots in use by their holders, and the moves of units between slots."""

    def __init__(self, model: MaskedModel, layout: StreamLayout) -> None:
        self.tables = SlotTables(model, layout.slots)
        reserved = sorted({layout.slot(task) % layout.slots for task in layout.permanent})
        if not set(layout.tasks) <= layout.permanent:
            # Where some tasks may be unlearned, one slot at least is left for them.
            reserved = reserved[: layout.slots - 1]
        self.reserved = tuple(reserved)
        self.places = tuple(slot for slot in range(layout.slots) if slot not in reserved)
        self._initial = {
            name: parameter.detach().clone()
            for name, parameter in model.backbone.named_parameters(prefix="backbone")
            if self.tables.axes(name)
        }
        self.held: dict[int, HeldSlot] = {}
        self._order: tuple[int, ...] = ()
        self.task: int | None = None
        self._own: int | None = None
        self._open: frozenset[int] = frozenset()
        self._unfinished: tuple[list[tuple[Tensor, Tensor]], tuple[int, ...]] | None = None

    # Around a training ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, task: int, model: MaskedModel, layout: StreamLayout, opened: frozenset[int], when_full: WhenFull
    ) -> FreeUnits:
        """Give a task its slot, and bring it to the first place."""
        device = model.cumulative_mask().device
        blocking: frozenset[int] = frozenset()
        if task in layout.permanent:
            if not self.reserved:
                raise CapacityError(
                    f"task {task} is permanent, but no slot was set apart: the stream of the first task declared no "
                    "permanent task; declare them all from the beginning"
                )
            own, slots = None, self.reserved
        else:
            own, blocking = self._take(task, layout, when_full)
            slots = self.places[:1]
        self.task, self._own, self._open = task, own, opened
        order = self._training_order()
        # What no task covers starts from its initial slot's values: the place does not show in the bits.
        initial_slots = self._initial_slots(order)
        covered = self._covered(model, source := self._source(order))

        def started(name: str, value: Tensor, moved: Tensor) -> Tensor:
            if name in self._initial:
                start = gathered(self._initial[name].to(value.device), self.tables.axes(name), initial_slots)
                return torch.where(covered[name], moved, start)
            if name.startswith(f"heads.{task}."):  # it was drawn for the places that units have now
                return value
            return self.tables.moved(name, value, initial_slots) if name.startswith(f"own.{task}.") else moved

        with self._as_a_whole(model, Tensors({})):
            self._move(model, Tensors({}), source, started)
            self._order = order
        units = self.tables.within(slots, device)
        return FreeUnits(units | self.tables.left_over(device) if own is None else units, blocking)

    def _take(self, task: int, layout: StreamLayout, when_full: WhenFull) -> tuple[int, frozenset[int]]:
        """The key of the slot that a task gets, and the tasks that keep it from one of its own."""
        initial_slot = layout.slot(task) % self.tables.slots
        if len(self.held) < len(self.places):
            # Keys grow, and a dictionary keeps the order in which they came: that in which slots were taken.
            key = max(self.held, default=-1) + 1
            self.held[key] = HeldSlot(initial_slot, (task,))
            return key, frozenset()
        holders = frozenset(chain.from_iterable(held.tasks for held in self.held.values()))
        if when_full == "error" or not holders:
            raise CapacityError(
                f"task {task} finds none of {len(self.places)} slots free: tasks {sorted(holders)} hold them"
                + (f", and {len(self.reserved)} more are set apart for permanent tasks" if self.reserved else "")
                + f": {CHOICES}"
            )
        key = list(self.held)[initial_slot % len(self.held)]
        self.held[key] = replace(self.held[key], tasks=(*self.held[key].tasks, task))
        return key, holders

    def end(self, model: MaskedModel, tensors: Tensors, trajectory: Trajectory | None) -> None:
        """Bring every slot to its place again, after a task was finished or given up."""
        self.recover()
        if self.task is None and self._held_by(model, _tasks(model)) == self.held:
            return
        self.to_rest(model, tensors)
        self.task, self._own, self._open = None, None, frozenset()
        with Transaction() as change:
            self.rearrange(model, tensors, trajectory, change)
            change.commit()
        if trajectory is not None:
            trajectory.settle()

    def to_rest(self, model: MaskedModel, tensors: Tensors) -> None:
        """Bring all slots to the places that they have between trainings: there logs can be read."""
        self._carry(model, tensors, tuple(self.held))

    def to_training(self, model: MaskedModel, tensors: Tensors) -> None:
        """Bring all slots to the places that they have in the training that goes on."""
        self._carry(model, tensors, self._training_order())

    def _training_order(self) -> tuple[int, ...]:
        readable = {*self._open, self.task}
        others = [key for key in self.held if key != self._own]
        opened = [key for key in others if readable.issuperset(self.held[key].tasks)]
        # Its own slot, those that it may read, the closed ones: closed units add exact zeros behind all that counts,
        # so every sum comes out as in a model without their tasks.
        return (*([] if self._own is None else [self._own]), *opened, *(key for key in others if key not in opened))

    # After tasks were taken out -------------------------------------------------------------------------------

    def moved_without(self, model: MaskedModel, tasks: Sequence[int]) -> tuple[int, ...]:
        """The remaining tasks that read units which move when some tasks are taken out, in training order."""
        remaining = [task for task in _tasks(model) if task not in tasks]
        left = list(self._held_by(model, remaining))
        moving = [self.places[at] for at, key in enumerate(self.held) if key in left and left.index(key) != at]
        units = self.tables.within(moving, model.cumulative_mask().device)
        return tuple(task for task in remaining if bool((model.binary_mask(task) & units).any()))

    def _held_by(self, model: MaskedModel, remaining: Sequence[int]) -> dict[int, HeldSlot]:
        """The slots that remaining tasks hold, or read: of these no other task may take the units."""
        result = {}
        for place, (key, held) in zip(self.places, self.held.items(), strict=False):
            tasks = tuple(task for task in held.tasks if task in remaining)
            if not tasks:
                units = self.tables.within([place], model.cumulative_mask().device)
                tasks = tuple(task for task in remaining if bool((_reach(model, task) & units).any()))
            if tasks:
                result[key] = replace(held, tasks=tasks)
        return result

    @torch.no_grad()
    def rearrange(
        self, model: MaskedModel, tensors: Tensors, trajectory: Trajectory | None, change: Transaction
    ) -> None:
        """Close the gaps that tasks left, and return to its initial value what no remaining task covers."""
        held = self._held_by(model, _tasks(model))
        source = self._source(tuple(held))
        # In the middle of a training what no mask covers yet may be what the task learned: only freed slots are reset.
        settled = self._at_rest(model, source) if model.current_task is None else self._freed(held)
        self._move(model, tensors, source, settled, change)
        change.set(self, held=held, _order=tuple(held))
        if source == list(range(self.tables.slots)):
            return
        if tensors.heads is not None:
            tensors.heads.move_units(lambda name, value: self.tables.moved(name, value, source), change)
        if trajectory is not None:
            sources = {}
            for name, initial in self._initial.items():
                index = torch.arange(initial.numel()).reshape(initial.shape)
                sources[name] = gathered(index, self.tables.axes(name), source).reshape(-1)
            # Logs name entries by their place: they follow the units, or would lead back elsewhere.
            change.call(trajectory.restore, trajectory.logs)
            trajectory.rearrange(sources)

    def _at_rest(self, model: MaskedModel, source: Sequence[int]) -> Callable[[str, Tensor, Tensor], Tensor]:
        """Rule of the values that tensors hold between trainings."""
        covered, masks = self._covered(model, source), self._masks(model, source)
        use = {str(task): model.graph.sets.use(mask.float()) for task, mask in masks.items()}
        sets = {name.replace(".", "/"): spec.sets for name, spec in model.backbone.owned.items()}
        template = own_tensors(model.fresh_parts())

        def settled(name: str, value: Tensor, moved: Tensor) -> Tensor:
            if name in self._initial:
                return torch.where(covered[name], moved, self._initial[name].to(value.device))
            kind, task, *rest = name.split(".", 2)
            if task not in use or not value.dim():
                return moved
            if kind == "heads" and rest == ["weight"] and self.tables.output:
                is_open = use[task][model.graph.output.to(value.device)] > 0
                return torch.where(is_open, moved, torch.zeros_like(moved))
            of_norm = sets.get(rest[0].partition(".")[0]) if kind == "own" else None
            if of_norm is None:
                return moved
            return torch.where(use[task][of_norm.to(value.device)] > 0, moved, template[rest[0]].to(value.device))

        return settled

    def _freed(self, held: Mapping[int, HeldSlot]) -> Callable[[str, Tensor, Tensor], Tensor]:
        """Rule of the values that tensors hold in the middle of a training: in slots that were freed, initial ones."""
        free = self.places[len(held) :]

        def settled(name: str, value: Tensor, moved: Tensor) -> Tensor:
            for axis in self.tables.axes(name) if name in self._initial and free else ():
                inside = axis.within(value.shape, free, value.device)
                moved = torch.where(inside, self._initial[name].to(value.device), moved)
            return moved

        return settled

    # Moves ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _carry(self, model: MaskedModel, tensors: Tensors, order: tuple[int, ...]) -> None:
        source = self._source(order)
        if source == list(range(self.tables.slots)):
            self._order = order
            return
        with self._as_a_whole(model, tensors):
            self._move(model, tensors, source, lambda name, value, moved: moved)
            self._order = order

    @contextmanager
    def _as_a_whole(self, model: MaskedModel, tensors: Tensors) -> Iterator[None]:
        """Move units and note their order in this block, or neither: earlier tasks' units move as well.

        The old values are noted before the first tensor is written, and dropped in one assignment behind the last, so
        that a move that was interrupted can be taken back even if taking it back is interrupted too.
        """
        self.recover()
        written = [value for _, value in (*tensors.values(model), *tensors.followers(model))]
        self._unfinished = [(value, value.clone()) for value in written], self._order
        try:
            yield
        except BaseException:
            self.recover()
            raise
        self._unfinished = None

    @torch.no_grad()
    def recover(self) -> None:
        """Take back a move that was interrupted."""
        if self._unfinished is None:
            return
        values, order = self._unfinished
        for value, old in values:
            value.copy_(old)
        self._order = order
        self._unfinished = None

    def _move(
        self,
        model: MaskedModel,
        tensors: Tensors,
        source: Sequence[int],
        settled: Callable[[str, Tensor, Tensor], Tensor],
        change: Transaction | None = None,
    ) -> None:
        """Let every slot take the values of another one, in all tensors or in none."""
        # All new values are made before the first is written: an error on the way leaves everything as it was.
        still = list(source) == list(range(self.tables.slots))
        new = []
        for name, value in tensors.values(model):
            moved = settled(name, value, value if still else self.tables.moved(name, value, source))
            if moved is not value:
                new.append((value, moved))
        if not still:
            new += [(value, self.tables.moved(name, value, source)) for name, value in tensors.followers(model)]
        for value, moved in new:
            if change is None:
                value.copy_(moved)
            else:
                change.write(value, moved)

    def _source(self, order: Sequence[int]) -> list[int]:
        """Slot whose units come to each slot, so that the slots in use get another order."""
        source = list(range(self.tables.slots))
        # A permutation: slots that nobody holds take the places that are left, so that no values are lost.
        now = dict(zip(self._order, self.places, strict=False))
        to = {place: now[key] for place, key in zip(self.places, order, strict=False) if key in now}
        rest = (place for place in self.places if place not in to.values())
        for place in self.places:
            source[place] = to[place] if place in to else next(rest)
        return source

    def _initial_slots(self, order: Sequence[int]) -> list[int]:
        """Slot whose initial values belong to each slot."""
        initial_slots = list(range(self.tables.slots))
        for place, key in zip(self.places, order, strict=False):
            initial_slots[place] = self.held[key].initial_slot
        return initial_slots

    def _masks(self, model: MaskedModel, source: Sequence[int]) -> dict[int, Tensor]:
        """The remaining tasks' masks once the slots have moved."""
        return {task: gathered(model.binary_mask(task), (self.tables.units,), source) for task in model.masks}

    def _covered(self, model: MaskedModel, source: Sequence[int]) -> dict[str, Tensor]:
        """Parameter → entries that some remaining task covers once the slots have moved."""
        device = model.cumulative_mask().device
        result = {n: torch.zeros_like(value, dtype=torch.bool, device=device) for n, value in self._initial.items()}
        for mask in self._masks(model, source).values():
            for name, reads in model.entries_under(mask):
                if name in result:
                    result[name] |= reads
        return result


def _tasks(model: MaskedModel) -> list[int]:
    """The remaining tasks, and the one in training."""
    return [*model.masks, *([] if model.current_task is None else [model.current_task])]


def _reach(model: MaskedModel, task: int) -> Tensor:
    """Units that a task reads, or may still come to read."""
    if task == model.current_task and model.allowed is not None:
        return model.allowed
    return model.binary_mask(task)
