"""Interfaces of compensation and repair for remaining tasks that an unlearning affects."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia.audit.record import RepairSummary
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.trajectory.removal import Removal, Revisions
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction


@runtime_checkable
class Compensation(Protocol):
    """Interface of a plugin that compensates remaining tasks during an unlearning, from data stored during training.

    It deletes its data of unlearned tasks. Its random draws derive from (seed, task), so a record can still be exact.
    """

    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Store data for later requests, after a task was trained and recorded, and while the task's data is available.

        Args:
            strategy: the strategy; its ``experience`` is that of the trained task.
            task: label of the trained task.
            unlearnable: tasks that may be requested from now on.
        """

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """Return True if the plugin can compensate a remaining task when the tasks in ``gone`` are unlearned."""

    def compensate(self, model: Any, gone: Collection[int], removal: Removal, change: Transaction) -> list[str]:
        """Compensate every remaining task that :meth:`covers` accepts, and delete all data of the tasks in ``gone``.

        Args:
            model: the strategy's model after the removal of the unlearned tasks' updates.
            gone: all tasks of this unlearning.
            removal: the removed updates; the trajectory no longer contains them.
            change: transaction that registers the undo step of every change before it is made.

        Returns:
            One line per change, for the record.
        """


@runtime_checkable
class RevisingCompensation(Compensation, Protocol):
    """Interface of a compensation that also revises the updates of remaining tasks while a removal is planned."""

    def begin(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Before a task's training: create the plugin's state for this training; arguments as in :meth:`prepare`."""

    def revise(self, model: Any, trajectory: Trajectory, gone: Collection[int]) -> Revisions:
        """Return revisions of remaining tasks' updates in ``model`` for an unlearning of ``gone``; change nothing."""


@runtime_checkable
class Repair(Protocol):
    """Interface of a plugin that stores samples of tasks, and trains affected tasks on them during an unlearning.

    It records its changes as a separate update in the trajectory. The next request first removes that update.
    """

    def repairable(self, model: nn.Module, affected: Sequence[int], tainted: Collection[int]) -> tuple[int, ...]:
        """Return the tasks in ``affected`` that :meth:`carry_out` would train on stored samples; change nothing.

        Args:
            model: the strategy's model before the removal.
            affected: remaining tasks that use changed entries, in training order.
            tainted: remaining tasks that could see an unlearned task. The removal alone restores all
                remaining tasks that are not tainted.
        """

    def forget(self, tasks: Collection[int], change: Transaction) -> str:
        """Delete all stored samples of the tasks in ``tasks``; return a line for the record."""

    def carry_out(
        self,
        model: Any,
        optimizer: Optimizer,
        trajectory: Trajectory,
        *,
        tasks: Sequence[int],
        compensated: Collection[int],
        changed: Mapping[str, Tensor],
        before: dict[str, Tensor] | None,
        change: Transaction,
    ) -> RepairSummary:
        """Train the tasks in ``tasks`` on their stored samples, and record the update in ``trajectory``.

        Args:
            model: the strategy's model after the removal.
            optimizer: the strategy's optimizer.
            trajectory: the trajectory after the removal; receives the repair's update.
            tasks: the result of :meth:`repairable`.
            compensated: the tasks that a compensation has just changed.
            changed: parameter name → bool tensor, True for entries that may change.
            before: values before the current task, which are repaired instead of the model's; None between tasks.
            change: transaction that registers the undo step of every change before it is made.
        """


def compensates(thing: Any) -> TypeGuard[Compensation]:
    """Return True if the object's class implements :class:`Compensation`."""
    return issubclass(type(thing), Compensation)  # isinstance would check every member of the object on each call


def revises(thing: Any) -> TypeGuard[RevisingCompensation]:
    """Return True if the object's class implements :class:`RevisingCompensation`."""
    return issubclass(type(thing), RevisingCompensation)


def repairs(thing: Any) -> TypeGuard[Repair]:
    """Return True if the object's class implements :class:`Repair`."""
    return issubclass(type(thing), Repair)


@dataclass(frozen=True)
class FittedHead:
    """Head and running statistics of a task, fitted to the model with or without the updates of some other tasks."""

    weight: Tensor
    bias: Tensor | None = None
    columns: Tensor | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)

    def places(self, model: TaskMaskedModel, task: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of the model that this head replaces, paired with the tensor's new value."""
        head = model.head(task)
        weight = head.get_parameter("weight").data
        if self.columns is None:
            yield weight, self.weight
        else:
            value = torch.zeros_like(weight)
            value[:, self.columns.to(value.device)] = self.weight.to(value)
            yield weight, value
        if self.bias is not None:
            yield head.get_parameter("bias").data, self.bias
        parts = model.task_parts(task) if self.statistics else None
        buffers = {} if parts is None else dict(parts.named_buffers())
        for name, value in self.statistics.items():
            yield buffers[name], value
