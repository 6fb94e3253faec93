"""Interfaces of compensation and repair: restore accuracy that other tasks lose by an unlearning."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.transaction import Transaction


@runtime_checkable
class Compensation(Protocol):
    """Interface of a plugin that uses stored data to restore the accuracy that remaining tasks lose in an unlearning.

    It deletes its data of unlearned tasks. Its random draws derive from (seed, task), so a record can still be exact.
    """

    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """After a task's training, while its data is available: store data to compensate tasks in later unlearnings.

        Args:
            strategy: the strategy; its ``experience`` is that of the trained task.
            task: label of the trained task.
            unlearnable: tasks that may be requested from now on.
        """

    def covers(self, task: int, removed: Collection[int]) -> bool:
        """Return True if the plugin can compensate ``task`` when the tasks in ``removed`` are unlearned."""

    def compensate(self, model: Any, tasks: Sequence[int], removal: Removal, change: Transaction) -> list[str]:
        """Restore accuracy of tasks that :meth:`covers` accepts; delete the plugin's data of the unlearned ``tasks``.

        Args:
            model: the strategy's model after the removal of the unlearned tasks' updates.
            tasks: all tasks of this unlearning.
            removal: the removed updates; the trajectory no longer contains them.
            change: transaction that registers the undo step of every change before it is made.

        Returns:
            One line per change, for the record.
        """


def is_compensation(obj: Any) -> TypeGuard[Compensation]:
    """Return True if the object's class implements :class:`Compensation`."""
    return issubclass(type(obj), Compensation)  # isinstance would check every member of the object on each call


def can_revise(obj: Any) -> bool:
    """Return True if the object is a :class:`Compensation` that also replaces recorded updates (``BackupPlugin``)."""
    return is_compensation(obj) and hasattr(type(obj), "revise")


def is_repair(obj: Any) -> bool:
    """Return True if the object trains, on stored samples, the tasks that an unlearning affects (``RepairPlugin``)."""
    return hasattr(type(obj), "carry_out")


@dataclass(frozen=True)
class FittedHead:
    """Linear head and running norm statistics, fitted to replace a task's own, for example after an unlearning."""

    weight: Tensor
    bias: Tensor | None = None
    columns: Tensor | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)

    def replacements(self, model: TaskMaskedModel, task: int) -> Iterator[tuple[Tensor, Tensor]]:
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
