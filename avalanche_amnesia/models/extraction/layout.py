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
        index: the entries that are kept, ascending; never none of them.
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
    """Where each entry of ``index`` lies in ``within``; both ascending, the first part of the second."""
    return torch.searchsorted(within, index)


def union(first: Tensor, second: Tensor) -> Tensor:
    """Entries of either, ascending."""
    return torch.cat([first, second]).unique()


def common(first: Tensor, second: Tensor) -> Tensor:
    """Entries of both, ascending; the first of all where there is none."""
    both = first[torch.isin(first, second)]
    return both if len(both) else first[:1]
