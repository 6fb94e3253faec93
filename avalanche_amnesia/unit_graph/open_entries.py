"""Weighted operations over the entries of weights that a mask reads, and no others.

Where a unit's mask is 0, features depend on no entry of its weights, whatever these hold: that is what protects tasks
from each other, and it saves work as well. Rows of units that are closed are not computed, nor columns behind units
that are closed: both are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

WORTH_IT = 3_000_000
"""Products of an entry and an input from which on it pays to leave them out: ``benchmarks/open_entries.py``."""


class OpenEntries(NamedTuple):
    """Entries of a weight ``(units, inputs, …)`` that a mask reads."""

    rows: Tensor | None
    columns: Tensor | None
    saved: float


class LayerMasks(dict[str, Tensor]):
    """Masks by layer, and what they read of large weights."""

    entries: Mapping[str, OpenEntries]

    def __init__(self, masks: Mapping[str, Tensor], entries: Mapping[str, OpenEntries] | None = None) -> None:
        super().__init__(masks)
        self.entries = {} if entries is None else entries

    def detached(self) -> LayerMasks:
        """The same, of which none collects a gradient."""
        return LayerMasks({name: mask.detach() for name, mask in self.items()}, self.entries)


def _over_open(
    operation: Callable[..., Tensor],
    axis: int,
    masks: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *options: Any,
) -> Tensor:
    """The operation on the entries of a weight that the masks read; 0 in the places of all other units."""
    entries = masks.entries.get(name) if isinstance(masks, LayerMasks) else None
    if entries is None or entries.saved * weight.numel() * (x.numel() // x.shape[axis]) < WORTH_IT:
        return operation(x, weight, bias, *options)
    rows, columns, _ = entries
    units = len(weight)
    if rows is not None:
        weight, bias = weight.index_select(0, rows), None if bias is None else bias.index_select(0, rows)
    if columns is not None:
        weight, x = weight.index_select(1, columns), x.index_select(axis, columns)
    computed = operation(x, weight, bias, *options)
    if rows is None:
        return computed
    shape = list(computed.shape)
    shape[axis] = units
    return computed.new_zeros(shape).index_add(axis, rows, computed)


def linear(masks: Mapping[str, Tensor], name: str, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """``x Wᵀ + b`` over open entries."""
    return _over_open(F.linear, -1, masks, name, x, weight, *options)


def conv1d(masks: Mapping[str, Tensor], name: str, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """A convolution over open entries."""
    return _over_open(torch.conv1d, -2, masks, name, x, weight, *options)


def conv2d(masks: Mapping[str, Tensor], name: str, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """A convolution over open entries."""
    return _over_open(torch.conv2d, -3, masks, name, x, weight, *options)


def conv3d(masks: Mapping[str, Tensor], name: str, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """A convolution over open entries."""
    return _over_open(torch.conv3d, -4, masks, name, x, weight, *options)


_OVER_OPEN = {F.linear: linear, torch.conv1d: conv1d, torch.conv2d: conv2d, torch.conv3d: conv3d}
_GROUPS = 6
"""Place of the number of groups among a convolution's arguments."""


def leave_closed_out(graph: fx.Graph) -> None:
    """Let a graph of torch's functions compute only open entries, in layers of parameters in one group."""
    masks = next(node for node in graph.nodes if node.op == "placeholder" and node.target == "masks")
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _OVER_OPEN or node.kwargs:
            continue
        weight = node.args[1]
        grouped = len(node.args) > _GROUPS and node.args[_GROUPS] != 1
        if isinstance(weight, fx.Node) and weight.op == "get_attr" and not grouped:
            node.target, node.args = _OVER_OPEN[node.target], (masks, str(weight.target), *node.args)
