"""Operations that move, join, pool or average entries: the kept entries go where they went."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from avalanche_amnesia.models.extraction.layout import Live, Size, live, union
from avalanche_amnesia.models.extraction.reading import entries_read
from avalanche_amnesia.models.extraction.shrinking import Shrinking, shrinks
from avalanche_amnesia.models.rules import mixing, pooling, shapes
from avalanche_amnesia.models.trees import leaves, map_leaves


@shrinks(*pooling.OVER_POSITIONS)
def pooled(walk: Shrinking, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A channel sees itself alone."""
    if not isinstance(x, Live) or x.axis is None or not x.along(1) or any(map(_depends, leaves((args, kwargs)))):
        return NotImplemented
    full = walk.on_meta(node, x, *args, **kwargs)
    if not isinstance(full[0], Tensor):
        return NotImplemented
    return x.at(walk.emit(node, (x, *args), kwargs), full)


@shrinks(mixing.reduced)
def reduced(walk: Shrinking, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Taken over other axes, zeros stay zeros."""
    if not isinstance(x, Live) or x.axis is None or x.fill != 0:
        return NotImplemented
    full = walk.on_meta(node, x, *args, **kwargs)
    dims = mixing.reduced_dims(x.shape, args, kwargs)
    if dims is None or x.axis in dims or not isinstance(full[0], Tensor):
        return NotImplemented
    axis = x.axis if full[0].dim() == x.dim else x.axis - sum(dim < x.axis for dim in dims)
    return live(walk.emit(node, (x, *args), kwargs), full, axis, x.index)


@shrinks(shapes.moved, shapes.moved_by_module, shapes.item)
def moved(walk: Shrinking, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Tried on the numbers of all entries: where those of the kept ones come out as they do in the full network."""
    values = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Live)]
    if node.target is operator.getitem and not isinstance(args[0], Live):
        return args[0][args[1]] if not any(map(_depends, leaves(args[1:]))) else NotImplemented
    if len(values) != 1 or values[0].axis is None or any(isinstance(v, Tensor) for v in leaves((args, kwargs))):
        return NotImplemented
    given = values[0]
    assert given.axis is not None
    assert given.index is not None
    x = walk.bring(given, given.index.sort().values, given.axis)
    args, kwargs = map_leaves((args, kwargs), lambda leaf: x if leaf is given else leaf)
    assert x.axis is not None
    assert x.index is not None
    places = torch.arange(x.shape.numel()).reshape(x.shape)
    kept = places.index_select(x.axis, x.index)
    is_kept = torch.zeros(x.shape.numel(), dtype=torch.bool)
    is_kept[kept.reshape(-1)] = True

    def on(numbers: Tensor, arguments: Any) -> list[Tensor]:
        a, k = arguments
        return _parts(walk.worked_out(node, a, k, lambda leaf: numbers if leaf is x else leaf))

    goals = on(places, (args, kwargs))
    found_cuts = [_cut(is_kept[goal]) for goal in goals]
    cuts = [cut for cut in found_cuts if cut is not None]
    if len(cuts) < len(goals):
        return NotImplemented
    expected = [goal.index_select(axis, index) for goal, (axis, index) in zip(goals, cuts, strict=True)]
    for changed in _candidates(args, kwargs, goals, expected):
        try:
            found = on(kept, changed)
        except (RuntimeError, ValueError, IndexError):
            continue
        if len(found) == len(expected) and all(map(torch.equal, found, expected)):
            here = walk.emit(node, *changed)
            full = walk.on_meta(node, *args, **kwargs)
            return _laid_out(walk, here, full, cuts, x.fill)
    return NotImplemented


def _parts(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _cut(alive: Tensor) -> tuple[int, Tensor] | None:
    """The axis of which only some entries are kept, and those; None where it is no single axis."""
    if alive.dim() == 0:
        return None
    if bool(alive.all()):
        return alive.dim() - 1, torch.arange(alive.shape[-1])
    for axis in range(alive.dim()):
        line = alive.transpose(0, axis).reshape(alive.shape[axis], -1)
        if bool((line == line[:, :1]).all()) and bool(line.any()):
            return axis, line[:, 0].nonzero()[:, 0]
    return None


def _candidates(args: Any, kwargs: Any, goals: list[Tensor], expected: list[Tensor]) -> list[tuple[Any, Any]]:
    """The arguments as they are, and with the numbers of all entries replaced by those of the kept ones."""
    sizes = {
        a: b for goal, cut in zip(goals, expected, strict=True) for a, b in zip(goal.shape, cut.shape, strict=True)
    }
    changed = {a: b for a, b in sizes.items() if a != b}

    def smaller(leaf: Any) -> Any:
        return changed.get(leaf, leaf) if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf

    return [(args, kwargs), map_leaves((args, kwargs), smaller)]


def _laid_out(walk: Shrinking, here: fx.Node, full: tuple[Any, Any], cuts: Sequence[Any], fill: Any) -> Any:
    if isinstance(full[0], Tensor):
        axis, index = cuts[0]
        return live(here, full, axis, index, fill)
    parts = [walk.item(here, number) for number in range(len(cuts))]
    return tuple(
        live(part, pair, axis, index, fill)
        for part, pair, (axis, index) in zip(parts, zip(*full, strict=True), cuts, strict=True)
    )


@shrinks(shapes.joined)
def joined(walk: Shrinking, node: fx.Node, tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    """Side by side along the axis of which entries are left out, or along another."""
    dim = kwargs.get("dim", kwargs.get("axis", dim))
    values = [part for part in tensors if isinstance(part, Live) and part.axis is not None]
    if node.target not in (torch.cat, torch.concat, torch.concatenate) or len({v.axis for v in values}) != 1:
        return NotImplemented
    full = walk.on_meta(node, tensors, dim)
    axis, along = values[0].axis, dim % full[0].dim()
    assert axis is not None
    fills = {v.fill for v in values}
    fill = fills.pop() if len(fills) == 1 else None
    if axis == along:
        if len({v.fill for v in values}) != 1:
            return NotImplemented
        starts = torch.tensor([0, *(part.shape[axis] for part in tensors)]).cumsum(0).tolist()
        kept = [_kept(part, axis) + start for part, start in zip(tensors, starts, strict=False)]
        nodes = [part.node if isinstance(part, Live) else walk.as_node(part) for part in tensors]
        return live(walk.new.call_function(torch.cat, (nodes, axis)), full, axis, torch.cat(kept), fill)
    index = values[0].index
    assert index is not None
    for value in values[1:]:
        assert value.index is not None
        index = union(index, value.index, full[0].shape[axis])
    if len(values) < len(tensors):
        wanted = entries_read(walk, node, axis)
        if wanted is None:
            return NotImplemented
        index, fill = wanted.nonzero()[:, 0], None
    nodes = [
        walk.bring(part, index, axis).node if isinstance(part, Live) else walk.as_node(part.index_select(axis, index))
        for part in tensors
    ]
    return live(walk.new.call_function(torch.cat, (nodes, along)), full, axis, index, fill)


def _kept(part: Any, axis: int) -> Tensor:
    return part.kept(axis) if isinstance(part, Live) else torch.arange(part.shape[axis])


@shrinks(shapes.padded)
def padded(
    walk: Shrinking, node: fx.Node, x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    """Zeros around other axes; around the axis of which entries are left out they are left out too."""
    if not isinstance(x, Live) or x.axis is None or x.fill != 0 or mode != "constant" or value:
        return NotImplemented
    assert x.index is not None
    pad, place = list(pad), 2 * (x.dim - 1 - x.axis)
    full = walk.on_meta(node, x, pad)
    before, behind = pad[place : place + 2] if place < len(pad) else (0, 0)
    if before < 0 or behind < 0:
        return NotImplemented
    pad[place : place + 2] = [0, 0] if place < len(pad) else []
    here = walk.new.call_function(F.pad, (x.node, pad)) if any(pad) else x.node
    return live(here, full, x.axis, x.index + before)


@shrinks(shapes.size, shapes.attribute)
def size(walk: Shrinking, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Numbers of the full network; those that depend on the batch are asked for when it is run."""
    if not isinstance(x, Live):
        return NotImplemented
    if args[:1] == ("device",):
        return next(walk.root.parameters()).device
    first, second = walk.on_meta(node, x, *args, **kwargs)
    if first == second:
        return first
    if isinstance(first, tuple):
        return tuple(_size(walk, x, dim, pair) for dim, pair in enumerate(zip(first, second, strict=True)))
    dim = args[0] if args and isinstance(args[0], int) else 0 if node.target is len else None
    return NotImplemented if dim is None else _size(walk, x, dim, (first, second))


def _size(walk: Shrinking, x: Live, dim: int, examples: tuple[int, int]) -> Any:
    if examples[0] == examples[1]:
        return examples[0]
    return Size(walk.new.call_method("size", (x.node, dim)), examples)


def _depends(leaf: Any) -> bool:
    return isinstance(leaf, (Live, Size))
