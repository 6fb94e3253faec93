"""How a value of the full network lies in the smaller one: of one axis only some entries are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class Live:
    """A tensor that depends on the input.

    Attributes:
        node: what computes it in the smaller network.
        full: its shape and type in the full network, on the meta device, for two sizes of batch.
        axis: of which only some entries are kept; None: the value is whole.
        index: the entries that are kept, in the order in which they lie; never none of them, nor all.
        fill: what all other entries hold in the full network; None: whatever it is, it is masked before it is read.
    """

    node: fx.Node
    full: tuple[Tensor, Tensor]
    axis: int | None = None
    index: Tensor | None = None
    fill: float | None = 0.0

    @property
    def dim(self) -> int:
        """Number of axes."""
        return self.full[0].dim()

    @property
    def shape(self) -> torch.Size:
        """In the full network, for the first of the two sizes of batch."""
        return self.full[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""
        return self.full[0].dtype

    def kept(self, axis: int) -> Tensor:
        """The entries that are kept along an axis, ``(kept,)``."""
        if self.index is not None and axis % self.dim == self.axis:
            return self.index
        return torch.arange(self.shape[axis])

    def along(self, axis: int) -> bool:
        """Whether the value is whole, or lacks entries of this axis alone, which are all zero."""
        return self.axis is None or (self.axis == axis % self.dim and self.fill == 0)

    def at(self, node: fx.Node, full: tuple[Tensor, Tensor] | None = None) -> Live:
        """The same layout, computed by another node."""
        return replace(self, node=node, full=self.full if full is None else full)


def live(
    node: fx.Node, full: tuple[Tensor, Tensor], axis: int | None = None, index: Tensor | None = None, fill: Any = 0.0
) -> Live:
    """A value; whole if all entries of the axis are kept."""
    if axis is None or index is None or len(index) == full[0].shape[axis]:
        return Live(node, full)
    return Live(node, full, axis % full[0].dim(), index, fill)


@dataclass(frozen=True)
class Size:
    """A number that depends on the size of the batch.

    Attributes:
        node: what computes it.
        examples: its values for the two sizes of batch.
    """

    node: fx.Node
    examples: tuple[int, int]


def nonzero(open_: Tensor) -> Tensor:
    """Numbers of the entries that are not zero; the first where there is none, since no layer may be empty."""
    found = (open_ != 0).nonzero()[:, 0]
    return found if len(found) else torch.zeros(1, dtype=torch.long)


def places_in(index: Tensor, within: Tensor) -> Tensor:
    """Where each entry of ``index`` lies in ``within``; one past its end for what it lacks."""
    places = torch.full((int(torch.cat([index, within]).max()) + 1,), len(within))
    places[within] = torch.arange(len(within))
    return places[index]


def union(first: Tensor, second: Tensor, units: int) -> Tensor:
    """Entries of either: the first's as they lie, then what they lack, so that a value grows at its end alone.

    All ``units`` entries are a whole value, in order.
    """
    both = torch.cat([first, second[~torch.isin(second, first)]])
    return both if len(both) < units else torch.arange(units)


def as_they_lie(wanted: Tensor, held: Tensor) -> Tensor:
    """The entries that are wanted, in the order in which they are held if they all are."""
    found = held[torch.isin(held, wanted)]
    return found if len(found) == len(wanted) else wanted


def common(first: Tensor, second: Tensor) -> Tensor:
    """Entries of both, as they lie in the first; the first of all where there is none."""
    both = first[torch.isin(first, second)]
    return both if len(both) else first[:1]
