"""A trajectory in which repairs are writers of their own, taken out with any task whose data they used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

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
        self._pending: list[tuple[frozenset[int], Mapping[str, Tensor], Mapping[str, Tensor]]] = []

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
    ) -> Removal:
        """As the base class's, with the repairs; nothing stays for the sake of its readers."""
        return super().remove(self.writers(tasks), current, before)

    def repair(
        self,
        tasks: Iterable[int],
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        undo: ExitStack,
    ) -> None:
        """Record a repair once the removal that it belongs to is applied.

        Args:
            tasks: whose data it used.
            before: tensor name → values before it.
            after: tensor name → values behind it.
            undo: receives the way back.
        """
        undo.callback(self._pending.clear)
        self._pending.append((frozenset(tasks), before, after))

    def apply(self, removal: Removal) -> None:
        """As the base class's; then record the repair."""
        super().apply(removal)
        for tasks, before, after in self._pending:
            number = min(self.repairs, default=0) - 1
            self.repairs = {**self.repairs, number: tasks}
            self.record(number, before, after)
        self._pending.clear()
