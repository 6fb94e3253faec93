"""Pools in any free slot, where units can move without a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates.base_sgd import PeriodicEval
from torch import Tensor

from avalanche_amnesia.isolation.pools import (
    LabelledPools,
    Pools,
    StreamLayout,
    allocation_within,
    is_entrywise,
    opened_to,
)
from avalanche_amnesia.isolation.relocation import KeptTensors, Relocation, Tensors
from avalanche_amnesia.isolation.slots import SlotError
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.models.allocation import UnitAllocation
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.trajectory.fidelity import Fidelity
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction

_OF_THE_HOST = (EvaluationPlugin, PeriodicEval, Clock)
"""Avalanche's plugins that hold nothing laid out by units; this package's own say so by ``follows_units``."""


class MovingPools(LabelledPools):
    """Pools that lie in any free slot; those of the remaining tasks close the gap when one is unlearned."""

    def __init__(self, options: Pools, min_units: int) -> None:
        super().__init__(options, min_units)
        self.relocation: Relocation | None = None

    def begin(self, strategy: Any, model: MaskedModel, task: int) -> UnitAllocation:
        """Units of a free slot, where they lie while the task trains."""
        layout = self.layout(strategy, model)
        reason = _in_the_way(strategy, model)
        if self.relocation is None:
            self.relocation = self._first(model, layout, reason)
        elif reason:
            raise ValueError(
                f"the tasks of this run lie in any free slot, which needs what it began with, but {reason}; take that "
                "back, or begin with Pools(moving=False)"
            )
        opened = opened_to(task, model, layout)
        free = self.relocation.begin(task, model, layout, opened, self.options.when_full)
        return allocation_within(free.units, task, model, layout, free.blocking_tasks)

    def _first(self, model: MaskedModel, layout: StreamLayout, reason: str) -> Relocation:
        if not reason and model.masks:
            reason = f"tasks {list(model.masks)} were trained before this plugin was there"
        if not reason:
            try:
                return Relocation(model, layout)
            except SlotError as error:
                reason = str(error)
        raise ValueError(
            f"Pools(moving=True) is not possible: {reason}; leave moving= out, and slots follow from labels"
        )

    def written_at_end(self, model: MaskedModel, before: Mapping[str, Tensor]) -> Iterable[Tensor]:
        """The whole model, and the values before the task: units go to their places again."""
        return [] if self.relocation is None else [*model.parameters(), *model.buffers(), *before.values()]

    def recover(self) -> None:
        """Take back a move of units that was interrupted."""
        if self.relocation is not None:
            self.relocation.recover()

    def end(self, strategy: Any, model: MaskedModel, before: Mapping[str, Tensor]) -> None:
        """Bring every task to its place again, after a training was finished or given up."""
        if self.relocation is not None:
            self.relocation.end(model, Tensors(before, heads=_heads(strategy)), _trajectory(strategy))

    @contextmanager
    def at_rest(self, strategy: Any, model: MaskedModel, before: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in the middle of a training: every task at its place, for the length of a block."""
        if self.relocation is None or not before:
            yield
            return
        tensors = Tensors(before, strategy.optimizer)
        self.relocation.to_rest(model, tensors)
        try:
            yield
        finally:
            self.relocation.to_training(model, tensors)

    def rearrange(self, strategy: Any, model: MaskedModel, before: Mapping[str, Tensor], change: Transaction) -> None:
        """Close the gaps that tasks left."""
        if self.relocation is not None:
            tensors = Tensors(before, strategy.optimizer, _heads(strategy))
            self.relocation.rearrange(model, tensors, _trajectory(strategy), change)

    def moved_without(self, model: MaskedModel, tasks: Sequence[int]) -> tuple[int, ...]:
        """The remaining tasks that read units which move when some tasks are taken out, in training order."""
        return () if self.relocation is None else self.relocation.moved_without(model, tasks)


def _trajectory(strategy: Any) -> Trajectory | None:
    stores = (getattr(plugin, "trajectory", None) for plugin in strategy.plugins)
    return next((store for store in stores if isinstance(store, Trajectory)), None)


def _heads(strategy: Any) -> KeptTensors | None:
    return next((plugin for plugin in strategy.plugins if isinstance(plugin, KeptTensors)), None)


def _in_the_way(strategy: Any, model: MaskedModel) -> str:
    """Reason why tasks can't lie in any free slot; empty if there is none."""
    if not is_entrywise(strategy.optimizer):
        return f"{type(strategy.optimizer).__name__} moves entries by what others hold"
    if not getattr(strategy, "optimizer_always_fresh", False):
        return "the optimizer's state outlives a task"
    foreign = sorted(
        type(plugin).__name__
        for plugin in strategy.plugins
        if not getattr(plugin, "follows_units", False) and not isinstance(plugin, _OF_THE_HOST)
    )
    if foreign:
        return f"plugins {foreign} may keep what would have to move with the units"
    trajectory = _trajectory(strategy)
    if trajectory is not None and trajectory.fidelity != Fidelity():
        return "the trajectory's economies depend on the places of entries"
    obeying = (plugin for plugin in strategy.plugins if isinstance(getattr(plugin, "ledger", None), TaskLedger))
    for plugin in obeying:
        if getattr(plugin, "obey", True) is not True:
            return f"obey={plugin.obey!r} leaves forgotten tasks where they are"
    if model.shared_head is not None:
        return "all tasks share one head"
    return ""
