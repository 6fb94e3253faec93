"""Units that a task may take and read, and who decides about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.transaction import Transaction


@dataclass(frozen=True)
class UnitAllocation:
    """The units that one task may use."""

    own: Tensor
    readable: Tensor
    open_tasks: frozenset[int]
    sharing_tasks: frozenset[int]
    permanent: bool
    blocking_tasks: frozenset[int] = frozenset()
    entrywise: bool = True

    @property
    def allowed(self) -> Tensor:
        """Units that its mask may open, bool ``(n_units,)``."""
        return self.own | self.readable

    @property
    def related_tasks(self) -> frozenset[int]:
        """The tasks whose units it meets."""
        return self.open_tasks | self.sharing_tasks | self.blocking_tasks

    @property
    def influences(self) -> frozenset[int] | None:
        """The tasks that can leave a trace in its training; None: all of them."""
        return self.related_tasks if self.entrywise else None

    @property
    def alone(self) -> bool:
        """Tell whether nothing in its units has to be saved for others."""
        return not self.permanent and not self.sharing_tasks


class UnitAllocator:
    """Allocation of units to tasks, in one run; this one lets every task use all units.

    A subclass may let units move between trainings; the others' bits must not show where they lie.
    """

    isolates = False
    """Tell whether a task trains as if the tasks were not there that its allocation does not name."""

    def share_when_full(self) -> None:
        """Let tasks that find no units of their own share those of others from now on."""

    def begin(self, strategy: Any, model: MaskedModel, task: int) -> UnitAllocation | None:
        """Units of a task whose training begins; None: all of them."""
        return None

    def end(self, strategy: Any, model: MaskedModel, before: Mapping[str, Tensor]) -> None:
        """Bring every task's units to their places, after a training was finished or given up."""

    def recover(self) -> None:
        """Take back a move of units that was interrupted."""

    def written_at_end(self, model: MaskedModel, before: Mapping[str, Tensor]) -> Iterable[Tensor]:
        """Tensors that :meth:`end` writes in place."""
        return ()

    def at_rest(self, strategy: Any, model: MaskedModel, before: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """In the middle of a training: every unit where it lies between trainings, for the length of a block."""
        return nullcontext()

    def rearrange(self, strategy: Any, model: MaskedModel, before: Mapping[str, Tensor], change: Transaction) -> None:
        """Follow the loss of tasks that were just taken out of the model, at rest."""

    def moved_without(self, model: MaskedModel, tasks: Sequence[int]) -> tuple[int, ...]:
        """The remaining tasks whose units would move if some tasks were taken out, in training order."""
        return ()


class Isolation(Protocol):
    """Options of an allocation, which a strategy is given as ``isolation=``."""

    def allocator(self, min_units: int) -> UnitAllocator:
        """An allocator for one run."""
