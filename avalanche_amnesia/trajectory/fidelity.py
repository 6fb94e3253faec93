"""Economies on a task's kept update, and the error that they add to the model, never to forgetting.

Every economy is *committed*: what a task's log will not hold is taken out of the model when the task ends, before
anything reads it. The log stays lossless, unlearning stays as exact as it was, and the error is in plain sight: in the
accuracy of the task itself. The other way round (the model keeps what the log does not) would leave residue behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt

import torch
from torch import Tensor

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory.coded import coded
from avalanche_amnesia.trajectory.sparse import SparseEntries, SparseValues

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class AddedError:
    """Difference of entries from what the training left."""

    entries: int = 0
    largest: float = 0.0
    squares: float = 0.0

    @classmethod
    def between(cls, committed: Tensor, trained: Tensor) -> AddedError:
        """Difference of two tensors of the same shape, in float64."""
        differ = ~same_bits(committed, trained)
        difference = committed[differ].double() - trained[differ].double()
        if not len(difference):
            return cls()
        return cls(len(difference), float(difference.abs().max()), float(difference.square().sum()))

    def __add__(self, other: AddedError) -> AddedError:
        largest = max(self.largest, other.largest)
        return AddedError(self.entries + other.entries, largest, self.squares + other.squares)

    @property
    def l2(self) -> float:
        """Euclidean norm of the differences."""
        return sqrt(self.squares)


@dataclass(frozen=True)
class Fidelity:
    """Reductions of a task's update before it is kept: small or inactive entries dropped, lower precision."""

    threshold: float | None = None
    min_active_steps: float | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not (isfinite(self.threshold) and self.threshold > 0):
            raise ValueError(f"threshold must be a number above 0, or None to keep every entry; got {self.threshold!r}")
        if self.min_active_steps is not None and not 0 < self.min_active_steps <= 1:
            raise ValueError(
                "min_active_steps must be a share of a task's steps, above 0 and at most 1, or None to keep every "
                f"entry; got {self.min_active_steps!r}"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(map(str, DTYPES))}, or None to keep values as they are; "
                f"got {self.dtype!r}"
            )

    def commit(self, before: Tensor, after: Tensor, active: Tensor | None) -> Commitment:
        """Reduce one tensor's update."""
        before, trained = before.detach().cpu(), after.detach().cpu()
        values = trained
        errors: dict[str, AddedError] = {}
        if self.threshold is not None:
            small = (trained.double() - before.double()).abs() < self.threshold
            values, errors["threshold"] = _back(before, values, small)
        if self.min_active_steps is not None:
            assert active is not None
            values, errors["min_active_steps"] = _back(before, values, active.cpu() < self.min_active_steps)
        if self.dtype is not None and self.dtype.itemsize < values.element_size():
            pruned = values
            values, updates = coded(before, pruned, self.dtype)
            errors["dtype"] = AddedError.between(values, pruned)
            return Commitment(values, updates, errors)
        return Commitment(values, SparseValues.of(before, ~same_bits(before, values)), errors)


@dataclass(frozen=True)
class Commitment:
    """A tensor's update as it is kept."""

    values: Tensor
    entries: SparseEntries
    errors: Mapping[str, AddedError] = field(default_factory=dict)


def _back(before: Tensor, values: Tensor, where: Tensor) -> tuple[Tensor, AddedError]:
    returned = torch.where(where, before, values)
    return returned, AddedError.between(returned, values)
