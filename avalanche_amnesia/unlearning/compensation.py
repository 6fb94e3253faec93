"""Compensation hooks for remaining tasks, which an unlearning takes something from."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.trajectory.revision import Revisions
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction


@runtime_checkable
class Compensation(Protocol):
    """Prepared while tasks are trained, applied inside an unlearning, as a part of its all or nothing.

    It purges itself of the tasks that go, and what it draws derives from (seed, task): a record may be exact beside it.
    """

    def prepare(self, strategy: Any, task: int, unlearnable: Collection[int]) -> None:
        """Look ahead, when a task has been trained, committed and recorded, and its data is still at hand.

        Args:
            strategy: whose ``experience`` holds the task.
            task: its label.
            unlearnable: tasks that may be requested from now on.
        """

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """Tell whether :meth:`compensate` does something for a remaining task that is affected by the loss of others.

        Args:
            task: a remaining task that uses entries which change.
            gone: the tasks that go, together.
        """

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

    def begin(self, strategy: Any, task: int, unlearnable: Collection[int]) -> None:
        """Get ready when the training of a task begins; its mask and its head have been made.

        Args:
            strategy: whose ``experience`` holds the task.
            task: its label.
            unlearnable: earlier tasks that may be requested now.
        """

    def revise(self, model: Any, trajectory: Trajectory, gone: Collection[int]) -> Revisions:
        """Revisions of the updates of remaining tasks; changes nothing.

        Args:
            model: the strategy's, as it is, with the tasks that go.
            trajectory: as it is.
            gone: the tasks that go, together.
        """


def compensates(thing: object) -> TypeGuard[Compensation]:
    """Tell whether something is a :class:`Compensation`, by its class."""
    kind: Any = type(thing)
    return _implements(kind, Compensation)


def revises(thing: object) -> TypeGuard[RevisingCompensation]:
    """Tell whether something is a :class:`RevisingCompensation`, by its class."""
    kind: Any = type(thing)
    return _implements(kind, RevisingCompensation)


@lru_cache(maxsize=256)
def _implements(kind: Any, protocol: Any) -> bool:
    return issubclass(kind, protocol)  # with a protocol this goes through all its members, every time
