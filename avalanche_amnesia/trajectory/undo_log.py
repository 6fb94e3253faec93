"""Undo log of a writer (a task, or a repair), and its size in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import sqrt
from operator import add
from pathlib import Path
from typing import Any

from avalanche_amnesia.saving.encoding import checked, made
from avalanche_amnesia.trajectory.coded import SparseUpdates
from avalanche_amnesia.trajectory.fidelity import AddedError, Commitment
from avalanche_amnesia.trajectory.sparse import SparseEntries, SparseValues


@dataclass(frozen=True)
class LogFile:
    """The file that a log is mapped from."""

    path: Path
    place: tuple[int, int]
    size: int
    checksum: str


class Log(dict[str, SparseEntries]):
    """Tensor name → the entries of it that a task, or a repair, moved, with the way back."""

    def __init__(
        self,
        entries: Mapping[str, SparseEntries],
        parameters: int,
        errors: Mapping[str, AddedError],
        repair_of: frozenset[int] | None = None,
        file: LogFile | None = None,
    ) -> None:
        super().__init__(entries)
        self.parameters, self.errors, self.repair_of, self.file = parameters, dict(errors), repair_of, file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "file": None}

    def state(self) -> dict[str, Any]:
        """The log as a value of a saved state; where its file lies is not part of it."""
        return {
            "entries": entries_state(self),
            "parameters": self.parameters,
            "errors": {option: dict(vars(error)) for option, error in self.errors.items()},
            "repair_of": self.repair_of,
        }

    @classmethod
    def from_state(cls, state: Any) -> Log:
        """What :meth:`state` returned, as a log."""
        kinds = {"entries": dict, "parameters": int, "errors": dict, "repair_of": frozenset | None}
        entries, parameters, errors, repair_of = checked(state, **kinds)
        found = {option: made(AddedError, error) for option, error in errors.items()}
        return cls(entries_from(entries), parameters, found, repair_of)

    @classmethod
    def of(cls, commitments: Mapping[str, Commitment], parameters: int) -> Log:
        """The log of a task whose tensors' updates were reduced to these."""
        options = dict.fromkeys(option for c in commitments.values() for option in c.errors)
        errors = {
            option: reduce(add, [c.errors[option] for c in commitments.values() if option in c.errors])
            for option in options
        }
        moved = {name: c.entries for name, c in commitments.items() if bool(c.entries.where.any())}
        return cls(moved, parameters, errors)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(entry.nbytes for entry in self.values())

    def with_entries(self, entries: Mapping[str, SparseEntries]) -> Log:
        """A log of the same writer with other entries; no file holds it yet."""
        return Log(entries, self.parameters, self.errors, self.repair_of)

    def unless_same(self, other: Log) -> Log:
        """``other`` where it holds the very same entries, and perhaps has a file."""
        same = self.keys() == other.keys() and all(self[name] is other[name] for name in self)
        return other if same else self


def entries_state(entries: Mapping[str, SparseEntries]) -> dict[str, Any]:
    """Tensor name → entries, as a value of a saved state."""
    return {name: dict(vars(entry)) for name, entry in entries.items()}


def entries_from(state: Any) -> dict[str, Any]:
    """What :func:`entries_state` returned, as entries."""
    return {name: made(SparseUpdates if "codes" in of else SparseValues, of) for name, of in state.items()}


def report(logs: Mapping[int, Log], merged: frozenset[int]) -> dict[int, dict[str, float]]:
    """A row per task: entries, bytes, error added; see :meth:`Trajectory.report`."""
    options = list(dict.fromkeys(option for log in logs.values() for option in log.errors))
    rows: dict[int, dict[str, float]] = {}
    for task, log in logs.items():
        entries = sum(int(entry.where.sum()) for entry in log.values())
        errors = log.errors.values()
        rows[task] = {
            "entries": entries,
            "share": entries / max(log.parameters, 1),
            "bytes": log.nbytes,
            "bytes_per_parameter": log.nbytes / max(log.parameters, 1),
            "error_max": max((error.largest for error in errors), default=0.0),
            "error_l2": sqrt(sum(error.squares for error in errors)),  # no entry is counted by two options
        }
        for option in options:
            error = log.errors.get(option, AddedError())
            rows[task] |= {f"{option}_max": error.largest, f"{option}_l2": error.l2}
        rows[task]["merged"] = task in merged
    return rows
