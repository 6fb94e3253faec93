"""Compensation and repair of remaining tasks, which an unlearning takes something from."""

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
    """Prepared while tasks are trained, applied inside an unlearning, as a part of its all or nothing.

    It purges itself of the tasks that go, and what it draws derives from (seed, task): a record may be exact beside it.
    """

    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Look ahead, when a task has been trained, committed and recorded, and its data is still at hand.

        Args:
            strategy: whose ``experience`` holds the task.
            task: its label.
            unlearnable: tasks that may be requested from now on.
        """

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """Tell whether :meth:`compensate` helps a remaining task that uses entries which go with others."""

    def compensate(self, model: Any, gone: Collection[int], removal: Removal, change: Transaction) -> list[str]:
        """Compensate every task that :meth:`covers` says can be, and drop whatever is kept of the tasks that go.

        Args:
            model: the strategy's, from which their updates have been taken out.
            gone: the tasks that go, together.
            removal: what was taken out; the trajectory has it behind it.
            change: receives every change, and its way back before it.

        Returns:
            Lines for the record.
        """


@runtime_checkable
class RevisingCompensation(Compensation, Protocol):
    """A compensation that revises what remaining tasks wrote into the backbone, while a removal is worked out."""

    def begin(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Get ready when the training of a task begins, with its mask and its head; arguments as of :meth:`prepare`."""

    def revise(self, model: Any, trajectory: Trajectory, gone: Collection[int]) -> Revisions:
        """Revisions of the updates of remaining tasks, by the model and the trajectory as they are; changes nothing."""


@runtime_checkable
class Repair(Protocol):
    """Holds samples of remaining tasks, and trains on them inside an unlearning, as a part of its all or nothing.

    What it changes it records as an update of its own, which the next request takes out before anything else.
    """

    def repairable(self, model: nn.Module, affected: Sequence[int], tainted: Collection[int]) -> tuple[int, ...]:
        """The affected tasks that would be trained again; changes nothing.

        Args:
            model: the strategy's, with the tasks that go.
            affected: remaining tasks that use entries which change, in training order.
            tainted: remaining tasks that were trained beside one that goes, or went: of the others the removal
                restores what they learned.
        """

    def forget(self, tasks: Collection[int], change: Transaction) -> str:
        """Drop everything of some tasks; returns a line for the record."""

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
        """Train tasks again and record it.

        Args:
            model: the strategy's, without the tasks that go.
            optimizer: the strategy's.
            trajectory: without the tasks that go; receives the repair's update.
            tasks: what :meth:`repairable` gave.
            compensated: those of them that a compensation has just done something for.
            changed: parameter name → bool tensor of the entries that may move.
            before: values before the task in training, which are repaired in place of the model's; None between tasks.
            change: receives every change, and its way back before it.
        """


def compensates(thing: Any) -> TypeGuard[Compensation]:
    """Tell whether something is a :class:`Compensation`, by its class."""
    return issubclass(type(thing), Compensation)  # isinstance looks at every member of the object, each time


def revises(thing: Any) -> TypeGuard[RevisingCompensation]:
    """Tell whether something is a :class:`RevisingCompensation`, by its class."""
    return issubclass(type(thing), RevisingCompensation)


def repairs(thing: Any) -> TypeGuard[Repair]:
    """Tell whether something is a :class:`Repair`, by its class."""
    return issubclass(type(thing), Repair)


@dataclass(frozen=True)
class FittedHead:
    """Head and statistics of a task, fitted to the model as it is, or as it would be without some other tasks."""

    weight: Tensor
    bias: Tensor | None = None
    columns: Tensor | None = None
    others_zero: bool = False
    statistics: Mapping[str, Tensor] = field(default_factory=dict)

    def places(self, model: TaskMaskedModel, task: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's tensors that it replaces, and their values."""
        head = model.head(task)
        weight = head.get_parameter("weight").data
        if self.columns is None:
            yield weight, self.weight
        else:
            value = torch.zeros_like(weight) if self.others_zero else weight.clone()
            value[:, self.columns.to(value.device)] = self.weight.to(value)
            yield weight, value
        if self.bias is not None:
            yield head.get_parameter("bias").data, self.bias
        parts = model.task_parts(task) if self.statistics else None
        buffers = {} if parts is None else dict(parts.named_buffers())
        for name, value in self.statistics.items():
            yield buffers[name], value
