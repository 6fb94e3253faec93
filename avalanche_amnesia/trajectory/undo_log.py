"""Undo log of a task or repair: the entries it changed, with their old values; its update is computed from these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.saving.values import StateError, checked, create
from avalanche_amnesia.trajectory.sparse import SparseEntries, SparseUpdates, SparseValues, put


@dataclass(frozen=True)
class RoundingError:
    """Rounding error of weights stored in a lower precision: number of changed entries, maximum, sum of squares."""

    entries: int = 0
    largest: float = 0.0
    squares: float = 0.0

    @classmethod
    def between(cls, committed: Tensor, trained: Tensor) -> RoundingError:
        """Return the rounding error, in float64, of the ``committed`` values compared with the ``trained`` values."""
        differ = ~same_bits(committed, trained)
        difference = committed[differ].double() - trained[differ].double()
        if not len(difference):
            return cls()
        return cls(len(difference), float(difference.abs().max()), float(difference.square().sum()))

    def __add__(self, other: RoundingError) -> RoundingError:
        largest = max(self.largest, other.largest)
        return RoundingError(self.entries + other.entries, largest, self.squares + other.squares)


class UndoLog(dict[str, SparseEntries]):
    """Undo log: a dict of tensor name to the entries that a task or repair changed, with their old values."""

    def __init__(
        self,
        entries: Mapping[str, SparseEntries],
        parameters: int,
        error: RoundingError = RoundingError(),
        repair_of: frozenset[int] | None = None,
    ) -> None:
        super().__init__(entries)
        self.parameters, self.error, self.repair_of = parameters, error, repair_of

    def state(self) -> dict[str, Any]:
        """Return the log as a dict, for a saved state."""
        return {
            "entries": entries_state(self),
            "parameters": self.parameters,
            "error": dict(vars(self.error)),
            "repair_of": self.repair_of,
        }

    @classmethod
    def from_state(cls, state: Any) -> UndoLog:
        """Return the log from the result of :meth:`state`."""
        kinds = {"entries": dict, "parameters": int, "error": dict, "repair_of": frozenset | None}
        entries, parameters, error, repair_of = checked(state, **kinds)
        return cls(entries_from_state(entries), parameters, create(RoundingError, error), repair_of)

    @property
    def nbytes(self) -> int:
        """Return the size of all entries in bytes."""
        return sum(entry.nbytes for entry in self.values())

    def with_entries(self, entries: Mapping[str, SparseEntries]) -> UndoLog:
        """Return a copy of this log with new ``entries``."""
        return UndoLog(entries, self.parameters, self.error, self.repair_of)


class Updates(Mapping[str, Tensor]):
    """Mapping of tensor name to the float64 update (change) by a task or repair, computed only when accessed."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[SparseEntries, Tensor, Tensor | None]] = {}

    def add(self, name: str, entry: SparseEntries, written: Tensor, kept: Tensor | None = None) -> None:
        """Store the update of tensor ``name``, as ``written`` minus the old values of ``entry``; 0 where ``kept``."""
        self._parts[name] = entry, written, kept

    def where(self, name: str) -> Tensor:
        """Return a bool tensor, True at the entries of tensor ``name`` recorded for the task or repair."""
        return self._parts[name][0].where

    def __getitem__(self, name: str) -> Tensor:
        entry, written, kept = self._parts[name]
        update = written.double() - entry.old_values(written).double()
        result = torch.zeros(entry.shape, dtype=torch.float64)
        put(result, entry.where.reshape(-1), update if kept is None else update.masked_fill(kept, 0.0))
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def entries_state(entries: Mapping[str, SparseEntries]) -> dict[str, Any]:
    """Return a dict of tensor name to the attributes of its sparse entries, for a saved state."""
    return {name: dict(vars(entry)) for name, entry in entries.items()}


def entries_from_state(state: Any) -> dict[str, Any]:
    """Rebuild the entries of an undo log from a result of :func:`entries_state`; raise StateError if invalid."""
    found: dict[str, SparseEntries] = {
        name: create(SparseUpdates, of) if "codes" in of else create(SparseValues, of) for name, of in state.items()
    }
    for name, entries in found.items():
        n = int(entries.where.sum())
        if entries.old_values(torch.zeros(n, dtype=entries.dtype)).shape != (n,):
            raise StateError(f"invalid value in state at {name}: other values than {n} entries")
    return found
