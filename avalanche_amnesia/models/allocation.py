"""Units that a task may take and read, and who decides about them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.strategy import Strategy


@dataclass(frozen=True)
class UnitAllocation:
    """The units that one task may use."""

    own: Tensor
    readable: Tensor
    open_tasks: frozenset[int]
    sharing_tasks: frozenset[int]
    permanent: bool
    entrywise: bool = True

    @property
    def allowed(self) -> Tensor:
        """Units that its mask may open, bool ``(n_units,)``."""
        return self.own | self.readable

    @property
    def related_tasks(self) -> frozenset[int]:
        """The tasks whose units it meets."""
        return self.open_tasks | self.sharing_tasks

    @property
    def influences(self) -> frozenset[int] | None:
        """The tasks that can leave a trace in its training; None: all of them."""
        return self.related_tasks if self.entrywise else None

    @property
    def alone(self) -> bool:
        """Tell whether nothing in its units has to be saved for others."""
        return not self.permanent and not self.sharing_tasks


class Isolation(Protocol):
    """Allocation of units to tasks, which a strategy is given as ``isolation=``."""

    def allocate(self, strategy: Strategy, model: MaskedModel, task: int, min_units: int) -> UnitAllocation:
        """Units of a task whose training begins, at least ``min_units`` of its own in every layer."""
