"""A trajectory in which repairs are writers of their own, taken out with any task whose data they used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from avalanche_amnesia.unlearning.revision import Revisions
from avalanche_amnesia.unlearning.trajectory import Readers, Removal, Trajectory


class RepairedTrajectory(Trajectory):
    """Takes out what tasks trained whoever reads it, and every repair made with their data.

    A repair is recorded under a negative number, behind the tasks trained so far.

    Args:
        options: those of :class:`Trajectory`.

    Attributes:
        repairs: number of a repair → the tasks whose data it used; also of those that are gone again.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.repairs: dict[int, frozenset[int]] = {}

    def written_for(self, tasks: Iterable[int]) -> dict[str, Tensor]:
        """Tensor name → bool tensor of the entries that the tasks, or repairs made with their data, moved."""
        result: dict[str, Tensor] = {}
        for writer in self.writers(tasks):
            for name, where in self.moved(writer).items():
                result[name] = result[name] | where if name in result else where
        return result

    def writers(self, tasks: Iterable[int]) -> list[int]:
        """The tasks, and the recorded repairs made with their data."""
        tasks = tuple(tasks)
        recorded = set(self.tasks)
        return [*tasks, *(n for n, of in self.repairs.items() if n in recorded and of & set(tasks))]

    def remove(
        self,
        tasks: Sequence[int],
        current: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        readers: Readers | None = None,
        revisions: Revisions | None = None,
    ) -> Removal:
        """As the base class's, with the repairs; nothing stays for the sake of its readers."""
        return super().remove(self.writers(tasks), current, before, revisions=revisions)

    def repair(
        self,
        tasks: Iterable[int],
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        undo: ExitStack,
    ) -> None:
        """Record a repair, behind the removal that it belongs to.

        Args:
            tasks: whose data it used.
            before: tensor name → values before it.
            after: tensor name → values behind it.
            undo: receives the way back.
        """
        undo.callback(self.restore, self.logs)
        undo.callback(setattr, self, "repairs", self.repairs)
        number = min(self.repairs, default=0) - 1
        self.repairs = {**self.repairs, number: frozenset(tasks)}
        self.record(number, before, after)
