"""Where the pools of a run's tasks lie: in any free slot where that can be exact, else in the slot of their labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates.base_sgd import PeriodicEval
from torch import Tensor

from avalanche_amnesia.isolation.moving import Relocation, Tensors
from avalanche_amnesia.isolation.pools import (
    Placement,
    Plot,
    StreamLayout,
    WhenFull,
    check_widths,
    is_entrywise,
    opened_to,
    plot_of,
    plot_on,
)
from avalanche_amnesia.isolation.slots import SlotError
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.snapshot import TaskSnapshot
from avalanche_amnesia.trajectory.fidelity import Fidelity
from avalanche_amnesia.trajectory.store import Trajectory

_FOLLOWING = (
    *(EvaluationPlugin, PeriodicEval, Clock, SeedingPlugin, InMemoryLoaderPlugin),
    *(TaskMaskPlugin, TrajectoryPlugin, UnlearningPlugin, CounterfactualPlugin),
)
"""Plugins that hold nothing laid out by units, or follow when units move."""


class PoolPlacement:
    """The places of a run's pools.

    Args:
        slots: number of pools; None: one per task of the stream.
        placement: ``free``, ``label``, or None: free where that is possible and of use.
        min_units: that a task must find free in every layer.

    Attributes:
        relocation: the slots in use; None before the first task, and where slots follow from labels.
        reason: why slots follow from labels; empty where they don't.
    """

    def __init__(self, slots: int | None, placement: Placement | None, min_units: int) -> None:
        self.slots, self.placement, self.min_units = slots, placement, min_units
        self.relocation: Relocation | None = None
        self.reason = ""

    def begin(self, strategy: Any, model: MaskedModel, task: int, when_full: WhenFull) -> Plot:
        """The units that a task may use, where they lie while it trains.

        Raises:
            CapacityError: if the task finds no pool of its own; nothing changed.
            ValueError: if tasks can't be placed as this run began, or as the user asked; nothing changed.
        """
        unlearning = find_plugin(strategy, UnlearningPlugin)
        deadline = getattr(strategy.experience, "deadline", None) if unlearning is None else unlearning.ledger.deadline
        layout = StreamLayout.of(strategy.experience, self.slots, deadline)
        check_widths(model, layout.slots, self.min_units)
        self._choose(strategy, model, layout)
        if self.relocation is None:
            return plot_of(task, model, layout, min_units=self.min_units, when_full=when_full, reason=self.reason)
        ground = self.relocation.begin(task, model, layout, opened_to(task, model, layout), when_full)
        return plot_on(ground.units, task, model, layout, ground.crowding)

    def _choose(self, strategy: Any, model: MaskedModel, layout: StreamLayout) -> None:
        """Choose, before the first task, how this run places its tasks; afterwards check that it still can."""
        if self.reason:
            return
        reason = _in_the_way(strategy, model)
        if self.relocation is not None:
            if reason:
                raise ValueError(
                    f"the tasks of this run lie in any free slot, which needs what it began with, but {reason}; take "
                    "that back, or begin with placement='label'"
                )
            return
        if self.placement == "label":
            reason = "placement='label' was asked for"
        elif not reason and self.placement is None and layout.deadline is not None and layout.slots < len(layout.tasks):
            reason = "past the deadline tasks keep their slots, of which later ones take what is left"
        if not reason and model.masks:
            reason = f"tasks {list(model.masks)} were trained before this plugin was there"
        if not reason:
            try:
                self.relocation = Relocation(model, layout)
            except SlotError as error:
                reason = str(error)
        if reason and self.placement == "free":
            raise ValueError(f"placement='free' is not possible: {reason}; leave it out, and slots follow from labels")
        self.reason = reason

    def moved_at_end(self, model: MaskedModel, snapshot: TaskSnapshot | None) -> list[Tensor]:
        """The parameters, and the values before the task, that the end of a training moves in place."""
        if self.relocation is None:
            return []
        return [*model.parameters(), *({} if snapshot is None else snapshot.values).values()]

    def recover(self) -> None:
        """Take back a move of units that was interrupted."""
        if self.relocation is not None:
            self.relocation.recover()

    def end(self, strategy: Any, model: MaskedModel, snapshot: TaskSnapshot | None) -> None:
        """Bring every task to its place again, after a training was finished or given up."""
        if self.relocation is not None:
            tensors = Tensors(
                {} if snapshot is None else snapshot.values, heads=find_plugin(strategy, CounterfactualPlugin)
            )
            self.relocation.end(model, tensors, _trajectory(strategy))

    @contextmanager
    def at_rest(self, strategy: Any, model: MaskedModel, snapshot: TaskSnapshot | None) -> Iterator[None]:
        """In the middle of a training: every task at its place, for the length of a block."""
        if self.relocation is None or snapshot is None:
            yield
            return
        tensors = Tensors(snapshot.values, strategy.optimizer)
        self.relocation.to_rest(model, tensors)
        try:
            yield
        finally:
            self.relocation.to_training(model, tensors)

    def rearrange(self, strategy: Any, model: MaskedModel, snapshot: TaskSnapshot | None, undo: ExitStack) -> None:
        """Close the gaps that tasks left."""
        if self.relocation is not None:
            heads = find_plugin(strategy, CounterfactualPlugin)
            tensors = Tensors({} if snapshot is None else snapshot.values, strategy.optimizer, heads)
            self.relocation.rearrange(model, tensors, _trajectory(strategy), undo)

    def moved_without(self, model: MaskedModel, tasks: Sequence[int]) -> tuple[int, ...]:
        """The remaining tasks that read units which move when some tasks are taken out, in training order."""
        return () if self.relocation is None else self.relocation.moved_without(model, tasks)


def _trajectory(strategy: Any) -> Trajectory | None:
    recorder = find_plugin(strategy, TrajectoryPlugin)
    return None if recorder is None else recorder.trajectory


def _in_the_way(strategy: Any, model: MaskedModel) -> str:
    """What keeps tasks from lying in any free slot; empty if nothing does."""
    if not is_entrywise(strategy.optimizer):
        return f"{type(strategy.optimizer).__name__} moves entries by what others hold"
    if not getattr(strategy, "optimizer_always_fresh", False):
        return "the optimizer's state outlives a task"
    foreign = sorted({type(plugin).__name__ for plugin in strategy.plugins if not isinstance(plugin, _FOLLOWING)})
    if foreign:
        return f"plugins {foreign} may keep what would have to move with the units"
    recorder, unlearning = find_plugin(strategy, TrajectoryPlugin), find_plugin(strategy, UnlearningPlugin)
    if recorder is not None and recorder.trajectory.fidelity != Fidelity():
        return "the trajectory's economies depend on the places of entries"
    if unlearning is not None and unlearning.obey is not True:
        return f"obey={unlearning.obey!r} leaves forgotten tasks where they are"
    if model.shared_head is not None:
        return "all tasks share one head"
    return ""
