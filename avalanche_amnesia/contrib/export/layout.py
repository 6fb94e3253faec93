"""Layout of a value of the full network in the smaller one: of one axis only some entries are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.units import compact


@dataclass(frozen=True)
class Live:
    """A tensor that the smaller network computes."""

    node: fx.Node
    shape: torch.Size
    axis: int | None = None
    index: Tensor | None = None
    fill: float | None = 0.0
    content: Tensor | None = None

    def kept(self, axis: int) -> Tensor:
        """The entries that are kept along an axis, ``(kept,)``."""
        if self.index is not None and axis % len(self.shape) == self.axis:
            return self.index
        return torch.arange(self.shape[axis])

    def along(self, axis: int) -> bool:
        """Tell whether the value is whole, or lacks only entries of this axis, which are all zero."""
        return self.axis is None or (self.axis == axis % len(self.shape) and self.fill == 0)

    def at(self, node: fx.Node, shape: torch.Size, axis: int | None = None) -> Live:
        """The same entries of an axis, computed by another node."""
        return replace(self, node=node, shape=shape, axis=self.axis if axis is None else axis, content=None)


def live(
    node: fx.Node, shape: torch.Size, axis: int | None = None, index: Tensor | None = None, fill: float | None = 0.0
) -> Live:
    """A value; whole if all entries of the axis are kept, in order."""
    if axis is None or index is None or torch.equal(index, torch.arange(shape[axis])):
        return Live(node, shape)
    return Live(node, shape, axis % len(shape), index, fill)


@dataclass(frozen=True)
class Size:
    """A number that depends on the size of the input."""

    node: fx.Node
    example: Any


def one_axis(open_: Tensor, ids: Tensor) -> tuple[int, Tensor] | None:
    """The axis of which only some entries are in use, and those; None where all are, or it is no single axis."""
    small = compact(open_)
    none = not bool(small.any())
    axes = [axis for axis, size in enumerate((compact(ids) if none else small).shape) if size > 1]
    if (len(axes) != 1 and not none) or not axes:
        return None
    return axes[0], torch.zeros(1, dtype=torch.long) if none else small.reshape(-1).nonzero()[:, 0]


def nonzero(open_: Tensor) -> Tensor:
    """Numbers of the entries that are not zero; the first where there is none, since no layer may be empty."""
    found = (open_ != 0).nonzero()[:, 0]
    return found if len(found) else torch.zeros(1, dtype=torch.long)


def places_in(index: Tensor, within: Tensor) -> Tensor:
    """Places of the entries of ``index`` in ``within``; one past its end for what it lacks."""
    places = torch.full((int(torch.cat([index, within]).max()) + 1,), len(within))
    places[within] = torch.arange(len(within))
    return places[index]


def as_they_lie(wanted: Tensor, held: Sequence[Tensor], units: int) -> Tensor:
    """Entries in the order of the longest of several indices, then of the next: a value grows only at its end.

    All ``units`` entries are a whole value, in order.
    """
    result = wanted[:0]
    for index in (*sorted(held, key=len, reverse=True), wanted):
        result = torch.cat([result, index[torch.isin(index, wanted) & ~torch.isin(index, result)]])
    return result if len(result) < units else torch.arange(units)
