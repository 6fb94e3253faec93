"""Masks in the graph of a masked backbone: functions that apply them, and graph nodes that compute them.

Where a unit's mask is 0, features do not depend on its weights, whatever their values. This protects tasks
from each other. It also saves work: rows of closed units and columns that read closed units are skipped,
because their results are 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from avalanche_amnesia.unit_graph.graph import Draft, OpenEntries
from avalanche_amnesia.unit_graph.values import ALWAYS, compact

WORTH_IT = 3_000_000
"""Number of multiplications above which skipping them saves time: ``benchmarks/open_entries.py``."""


def apply_mask(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``values · mask``, with +0 (never −0) where the mask is 0; return ``values`` if ``mask`` is None.

    A product turns negative values into −0, so an unprotected sign would remain visible to ``copysign``,
    ``signbit``, ``atan2`` or a division. Adding +0 removes that sign and changes no other value.
    """
    return values if mask is None else (values * mask.to(values.dtype)).add_(0.0)


def use_of_sets(masks: Sequence[Tensor], members: Tensor) -> Tensor:
    """Return a mask value per column of ``members``: the largest mask of the units whose indices the column lists."""
    return torch.cat([*masks, masks[0].new_tensor([1.0, 0.0])])[members].amax(0)


def call_owned(own: Mapping[str, nn.Module], name: str, *args: Any, **kwargs: Any) -> Any:
    """Run the task's own copy of the module ``name``, and return its result."""
    return own[name](*args, **kwargs)


def owned_parameter(own: Mapping[str, nn.Module], name: str) -> Tensor:
    """Return the task's own copy of the parameter ``name``."""
    return next(own[name].parameters())


def tensor_in(result: Any, number: int) -> Tensor:
    """Return the ``number``-th tensor in a module's result: a tensor, or a tuple, mapping or similar container."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)][number]


# Weighted operations over open entries ------------------------------------------------------------------------------


class LayerMasks(dict[str, Tensor]):
    """Dict of layer name to mask; to save time, ``entries`` lists the rows and columns of weights to compute."""

    entries: Mapping[str, OpenEntries]

    def __init__(self, masks: Mapping[str, Tensor], entries: Mapping[str, OpenEntries] | None = None) -> None:
        super().__init__(masks)
        self.entries = {} if entries is None else entries

    def detach_masks(self) -> LayerMasks:
        """Return a copy with every mask detached from gradients."""
        return LayerMasks({name: mask.detach() for name, mask in self.items()}, self.entries)


_OPERATIONS = (F.linear, torch.conv1d, torch.conv2d, torch.conv3d)
"""Functions of weighted layers, ordered by the number of axes of their weight, starting at two."""
_ATEN: Any = torch.ops.aten
AS_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.view.default: torch.reshape,
    _ATEN._unsafe_view.default: torch.reshape,
    _ATEN.linear.default: F.linear,
    _ATEN.conv1d.default: torch.conv1d,
    _ATEN.conv2d.default: torch.conv2d,
    _ATEN.conv3d.default: torch.conv3d,
    _ATEN.conv1d.padding: torch.conv1d,
    _ATEN.conv2d.padding: torch.conv2d,
    _ATEN.conv3d.padding: torch.conv3d,
}
"""Dict of operation in a traced graph to the function called instead; a view may fail for another memory layout."""


def run_open_units(
    masks: Mapping[str, Tensor], name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any
) -> Tensor:
    """Apply a linear or convolution layer; leave out closed units (mask 0, so results 0) if this saves time."""
    operation, axis = _OPERATIONS[weight.dim() - 2], 1 - weight.dim()
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
    return computed.new_zeros(shape).index_add_(axis, rows, computed)


_GROUPS = 6
"""Position of the number of groups among a convolution's arguments."""


def skip_closed_units(graph: fx.Graph) -> None:
    """Replace linear and ungrouped convolution calls by :func:`run_open_units`, which skips closed units (mask 0)."""
    masks = next(node for node in graph.nodes if node.op == "placeholder" and node.target == "masks")
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _OPERATIONS or node.kwargs:
            continue
        weight = node.args[1]
        grouped = len(node.args) > _GROUPS and node.args[_GROUPS] != 1
        if isinstance(weight, fx.Node) and weight.op == "get_attr" and not grouped:
            node.target, node.args = run_open_units, (masks, str(weight.target), *node.args)


# Masks as nodes ------------------------------------------------------------------------------------------------------


class MaskNodes:
    """Graph nodes that compute masks. Each is created once, at the graph's beginning, where all nodes can read it."""

    def __init__(self, graph: fx.Graph, draft: Draft, behind: fx.Node) -> None:
        self.graph, self.draft = graph, draft
        with graph.inserting_after(behind):
            self.masks = graph.placeholder("masks")
        with graph.inserting_after(self.masks):
            self._end = graph.call_function(dict)  # marks a position; removed later because no node reads it
        self._emitted: dict[object, fx.Node] = {}

    def emit(self, ids: Tensor) -> fx.Node | None:
        """Return a graph node that computes the masks of the unit sets ``ids``; None if none of them has a mask."""
        small = compact(ids)
        while small.dim() > 1 and small.shape[0] == 1:
            small = small[0]
        if bool((small == ALWAYS).all()):
            return None
        key = (tuple(small.shape), tuple(small.reshape(-1).tolist()))
        if key not in self._emitted:
            with self.graph.inserting_before(self._end):
                vector = self._emit_vector(small.reshape(-1))
                if small.dim() > 1:
                    vector = self.graph.call_method("reshape", (vector, tuple(small.shape)))
            self._emitted[key] = vector
        return self._emitted[key]

    def _emit_vector(self, ids: Tensor) -> fx.Node:
        call = self.graph.call_function
        rows = [self.draft.sets.members(number) for number in ids.tolist()]
        width = len(rows[0])
        if width and all(len(row) == width for row in rows):
            parts = [self._whole_layers([row[place] for row in rows]) for place in range(width)]
            if all(part is not None for part in parts):
                masks = [[call(operator.getitem, (self.masks, layer)) for layer in part or ()] for part in parts]
                joined = [of[0] if len(of) == 1 else call(torch.cat, (of,)) for of in masks]
                return reduce(lambda one, other: call(torch.maximum, (one, other)), joined)
        name = f"_sets_{len(self.draft.indices)}"
        self.draft.indices[name] = self.draft.sets.table(ids.tolist())
        layers = [call(operator.getitem, (self.masks, layer)) for layer in self.draft.layers]
        return call(use_of_sets, (layers, self.graph.get_attr(name)))

    def _whole_layers(self, units: Sequence[int]) -> list[str] | None:
        """Split ``units`` into whole layers, and return their names; None if they form no sequence of whole layers."""
        result, at = [], 0
        starts = {int(self.draft.sets.members(int(layer.sets[0]))[0]): layer for layer in self.draft.layers.values()}
        while at < len(units):
            layer = starts.get(units[at])
            if layer is None or list(units[at : at + layer.units]) != list(range(units[at], units[at] + layer.units)):
                return None
            result.append(layer.name)
            at += layer.units
        return result
