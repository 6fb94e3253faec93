"""What is known of each value while a backbone's graph is walked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.models.units import ALWAYS, NOTHING, compact


class Masked(IntEnum):
    """What the entries of masked units hold; the larger is the weaker knowledge."""

    ZERO = 0
    """Exactly zero."""
    CONSTANT = 1
    """A number that no parameter of another task reaches: zero after a sigmoid, say."""
    DIRTY = 2
    """Whatever other tasks' parameters make of it: must be masked before anything reads it."""


@dataclass(frozen=True)
class Value:
    """A tensor computed from the input: the set of units behind every entry, and what masked entries hold.

    Every entry is a function of the input and of parameters that the task's mask protects, unless it is DIRTY.
    """

    ids: Tensor
    dtype: torch.dtype
    masked: Masked = Masked.ZERO

    def __post_init__(self) -> None:
        if self.masked is not Masked.ZERO:  # padding that is no longer zero is there under every mask
            object.__setattr__(self, "ids", filled(self.ids))

    def meta(self) -> Tensor:
        """A tensor of this shape and type without memory."""
        return torch.empty(self.ids.shape, dtype=self.dtype, device="meta")

    def like(self, ids: Tensor | None = None, masked: Masked | None = None) -> Value:
        """The same with other sets, or other knowledge of the masked entries."""
        return replace(self, ids=self.ids if ids is None else ids, masked=self.masked if masked is None else masked)

    def like_dtype(self, dtype: torch.dtype) -> Value:
        """The same in another type."""
        return self if dtype == self.dtype else replace(self, dtype=dtype)

    @property
    def always(self) -> bool:
        """Whether no mask reaches any entry."""
        return bool((self.ids == ALWAYS).all())


@dataclass(frozen=True)
class ParameterValue:
    """A parameter used directly in a forward, or a part of one: the place of every entry in the flat parameter."""

    name: str
    index: Tensor
    dtype: torch.dtype
    frozen: bool = False
    owned: bool = False

    def part(self, index: Tensor) -> ParameterValue:
        """A part of it, or the same in another shape."""
        return replace(self, index=index)

    def meta(self) -> Tensor:
        """A tensor of this shape and type without memory."""
        return torch.empty(self.index.shape, dtype=self.dtype, device="meta")


def filled(ids: Tensor) -> Tensor:
    """The sets of entries that are not kept zero where nothing stands behind them: there they are always in use."""
    small = compact(ids)
    empty = small == NOTHING
    return torch.where(empty, ALWAYS, small).expand(ids.shape) if bool(empty.any()) else ids


def always_in_use(shape: Any, dtype: torch.dtype) -> Value:
    """A value that no mask reaches."""
    return Value(torch.full((), ALWAYS).expand(shape), dtype)
