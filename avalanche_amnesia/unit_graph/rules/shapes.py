"""Rules for operations that only move entries (views, slices, concatenation). The units of an entry move with it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.findings import Unsupported
from avalanche_amnesia.unit_graph.rules.elementwise import assign_units
from avalanche_amnesia.unit_graph.values import (
    ALWAYS,
    NOTHING,
    Masked,
    ParameterValue,
    Value,
    always_in_use,
    compact,
    leaves,
    map_leaves,
)
from avalanche_amnesia.unit_graph.walk import Walk, all_of_all, derives, rule

A: Any = torch.ops.aten

MOVES = (
    *(A.view, A.reshape, A._unsafe_view, A._reshape_alias, A.flatten, A.unflatten, A.permute, A.transpose, A.t),
    *(A.numpy_T, A.mT, A.movedim, A.moveaxis, A.swapaxes, A.squeeze, A.unsqueeze, A.select, A.slice, A.narrow),
    *(A.split, A.split_with_sizes, A.chunk, A.tensor_split, A.unbind, A.expand, A.broadcast_to, A.repeat, A.tile),
    *(A.roll, A.flip, A.rot90, A.diagonal, A.unfold, A.index_select, A.pixel_shuffle, A.pixel_unshuffle),
    *(A.channel_shuffle, A.repeat_interleave, A.ravel, A.atleast_2d, A.atleast_3d, A.hsplit, A.vsplit),
)
_LIKE_ANOTHER = (A.expand_as, A.view_as, A.reshape_as)


@rule(*MOVES)
@derives(*MOVES)
def move_entries(walk: Walk, node: fx.Node, *args: Any, **options: Any) -> Any:
    """Trace an operation that only moves entries, e.g. a reshape, by applying it to the tensor of unit-set ids."""
    if node.target is A.view.dtype:
        raise Unsupported(f"view({args[1]}) reads the bits of numbers as another type", "convert them: x.to(dtype)")
    operands = [leaf for leaf in leaves((args, options)) if isinstance(leaf, (Value, ParameterValue))]
    if len(operands) > 1 or operands[0] is not args[0]:
        return _without_rule(walk, node, args, options)  # a value determines which entries are moved
    # Numbers of sets or entries may lie in memory in another way than the values: reshape, not view.
    target: Any = A.reshape.default if node.target in (A.view.default, A._unsafe_view.default) else node.target
    return _move(args[0], lambda places: target(places, *args[1:], **options))


@rule(*_LIKE_ANOTHER)
@derives(*_LIKE_ANOTHER)
def move_entries_like(walk: Walk, node: fx.Node, x: Any, other: Any) -> Any:
    """Trace units through a reshape or expansion of ``x`` to the shape of ``other``."""
    if isinstance(x, Tensor):
        return always_in_use(walk.result(node))
    method = str(node.target).split(".")[1]
    return _move(x, lambda places: getattr(places, method.replace("view_as", "reshape_as"))(torch.empty(other.shape)))


@rule(A.index)
@derives(A.index)
def index_entries(walk: Walk, node: fx.Node, x: Any, indices: Sequence[Any]) -> Any:
    """Trace ``x[indices]`` by indexing the unit-set ids of ``x``; computed indices count as an unknown operation."""
    fixed = all(index is None or isinstance(index, Tensor) for index in indices)
    if isinstance(x, Tensor) or not fixed:
        return _without_rule(walk, node, (x, indices), {})
    places = tuple(slice(None) if index is None else index for index in indices)
    return _move(x, lambda held: held[places])


def _without_rule(walk: Walk, node: fx.Node, args: Any, options: Any) -> Any:
    values = any(isinstance(leaf, Value) for leaf in leaves((args, options)))
    return walk.conservative(node) if values else all_of_all(walk, node, *args, **options)


def _move(operand: Any, move: Any) -> Any:
    """Return a traced tensor after ``move``, e.g. a reshape, by applying ``move`` to its tensor of ids."""
    if isinstance(operand, Value):
        return map_leaves(move(operand.ids), lambda ids: operand.like(ids) if isinstance(ids, Tensor) else ids)
    first = move(operand.parts[0].index)
    if isinstance(first, Tensor):
        return operand.move_entries(move)
    return tuple(operand.move_entries(lambda place, i=i: move(place)[i]) for i in range(len(first)))


@rule(A.cat, A.concat, A.concatenate, A.stack, A.hstack, A.vstack)
def concatenate(walk: Walk, node: fx.Node, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Trace a concatenation; a parameter in it (e.g. a class token) belongs to the units of the first activation."""
    values = [part for part in tensors if isinstance(part, Value)]
    result = walk.result(node)
    along = dim % len(result.shape)
    parts: list[Tensor] = []
    masked = max(value.masked for value in values)
    by_stack = str(node.target).split(".")[1]
    for part in tensors:
        if isinstance(part, (Value, Tensor)):
            parts.append(walk.value(part).ids)
        elif part.fixed:
            walk.draft.record(part, torch.full((1,) * len(part.shape), ALWAYS))
            parts.append(torch.full(part.shape, ALWAYS))
        else:
            beside = compact(values[0].ids)
            if by_stack in ("stack", "hstack", "vstack") or beside.shape[along] != 1:
                raise Unsupported(
                    f"parameters {part.names} are joined with values along an axis on which their units differ",
                    "join them along another axis (tokens), or declare them frozen=[…]",
                )
            ids = beside.expand(part.shape)
            masked = max(masked, assign_units(walk, part, ids))
            parts.append(ids)
    made: Any = {"stack": torch.stack, "hstack": torch.hstack, "vstack": torch.vstack}.get(by_stack, torch.cat)
    ids = made(parts) if by_stack in ("hstack", "vstack") else made(parts, along)
    return Value(ids, masked)


@derives(A.cat, A.concat, A.concatenate, A.stack)
def concatenate_parameters(walk: Walk, node: fx.Node, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Trace a concatenation of parameters: an entry depends on its source, and is assumed to depend on some others."""
    result = walk.result(node)
    along = dim % len(result.shape)
    if str(node.target).startswith("aten.stack") or any(len(part.shape) != len(result.shape) for part in tensors):
        return all_of_all(walk, node, tensors, dim)
    operands = []
    start = 0
    for part in tensors:
        size = part.shape[along]
        if isinstance(part, ParameterValue):
            # Outside its own part nothing depends on it: reuse its first positions, which can only add dependences.
            at = (torch.arange(result.shape[along]) - start).clamp(0, size - 1)
            operands.append(part.move_entries(partial(torch.index_select, dim=along, index=at)))
        start += size
    return ParameterValue(result.shape, tuple(part for operand in operands for part in operand.parts))


@rule(A.pad, A.constant_pad_nd, zeros=True)
def pad_entries(
    walk: Walk, node: fx.Node, x: Any, pad: Sequence[int], mode: str | float = "constant", value: float | None = None
) -> Any:
    """Trace constant padding: zeros belong to no unit; a nonzero padding value counts as used by every task."""
    filling = mode if isinstance(mode, (int, float)) else value
    if not isinstance(x, Value) or (isinstance(mode, str) and mode != "constant"):
        return walk.conservative(node)
    around = ALWAYS if filling else NOTHING
    masked = Masked.ZERO if not filling or x.always else Masked.CONSTANT
    return x.like(F.pad(x.ids, list(pad), value=around), max(x.masked, masked) if filling else x.masked)


@rule(A.slice_scatter, A.select_scatter)
def overwrite_part(walk: Walk, node: fx.Node, x: Any, source: Any, *where: Any, **options: Any) -> Any:
    """Trace units through writing ``source`` into a part of ``x``: that part gets the units of ``source``."""
    by_parameter = isinstance(x, ParameterValue) or isinstance(source, ParameterValue)
    if by_parameter or any(isinstance(leaf, Value) for leaf in leaves((where, options))):
        return walk.conservative(node)
    x, source = walk.value(x), walk.value(source)
    ids = node.target(x.ids, source.ids, *where, **options)  # type: ignore[operator]
    return Value(ids, max(x.masked, source.masked))


@rule(A.copy)
def assign_slice(walk: Walk, node: fx.Node, x: Any, source: Any, *rest: Any) -> Any:
    """Trace units through copying ``source`` into ``x``: the result depends on the units of ``source`` alone."""
    if isinstance(source, ParameterValue):
        return walk.conservative(node)
    source = walk.value(source)
    return source.like(source.ids.expand(walk.result(node).shape))


@rule(A.fill, A.zero, A.zeros_like, A.ones_like, A.full_like, A.new_zeros, A.new_ones, A.new_full)
def fill_all(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Any:
    """Trace a tensor filled with one number: no mask affects it."""
    if any(isinstance(leaf, ParameterValue) for leaf in leaves((rest, options))):
        return walk.conservative(node)
    return always_in_use(walk.result(node))
