"""Rules for operations without weights: functions of single entries; moves, joins, pools and means of entries."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.contrib.export.shrinking import (
    Live,
    Shrinking,
    depends_on_the_input,
    live,
    nonzero,
    one_axis,
    places_in,
    shrinks,
)
from avalanche_amnesia.unit_graph.masking import masked
from avalanche_amnesia.unit_graph.rules.derived import walk_dims
from avalanche_amnesia.unit_graph.rules.elementwise import KEEP_ZERO, LIFT, POLES, SAME_VALUES
from avalanche_amnesia.unit_graph.rules.mixing import POOLS
from avalanche_amnesia.unit_graph.rules.shapes import MOVES
from avalanche_amnesia.unit_graph.values import Masked, leaves, map_leaves

A: Any = torch.ops.aten


@shrinks(*SAME_VALUES, *KEEP_ZERO, *LIFT, *POLES, A.add, A.sub, A.rsub, A.subtract, A.mul, A.multiply, A.div)
@shrinks(A.true_divide, A.floor_divide, A.remainder, A.fmod, A.pow, A.addcmul, A.maximum, A.minimum, A.where, A.lerp)
def entry_by_entry(walk: Shrinking, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Any number of operands, as they broadcast; left-out entries hold the function of what they held before."""
    if node not in walk.values:
        return NotImplemented
    value, cut = walk.values[node], walk.cut(node)
    if cut is None and not bool(walk.open(node).all()):
        return NotImplemented
    operands = leaves((args, kwargs))
    axis = next((x.axis - len(x.shape) for x in operands if isinstance(x, Live) and x.axis is not None), -1)
    axis = axis if cut is None else cut[0] - len(value.shape)
    index = walk.kept(node, axis, operands)
    summed = _added_into(walk, node, axis, index, *args, **kwargs)
    if summed is not None:
        return summed
    if cut is None:
        return walk.as_it_was(node, args, kwargs)
    fill = {Masked.ZERO: 0.0, Masked.DIRTY: None}.get(value.masked)
    if value.masked is Masked.CONSTANT:
        fill = _constant(walk, node, args, kwargs, axis, index)
        if fill is None:
            return NotImplemented
    units = value.shape[axis]
    here = walk.emit(node, *map_leaves((args, kwargs), lambda leaf: _brought(walk, leaf, axis, index, units)))
    return live(here, value.shape, axis, index, fill)


def _added_into(walk: Shrinking, node: fx.Node, axis: int, index: Tensor, *args: Any, **kwargs: Any) -> Live | None:
    """Sum of two values that lack different entries, the narrower added into the wider; None for any other sum."""
    if node.target is not A.add.Tensor or kwargs or not all(isinstance(x, Live) and x.fill == 0 for x in args):
        return None
    if args[0].shape != args[1].shape or any(x.axis not in (None, axis + len(x.shape)) for x in args):
        return None
    wide, narrow = sorted(args, key=lambda x: -len(x.kept(axis)))
    held, dim = narrow.kept(axis), axis + len(wide.shape)
    if len(held) == len(index) or not all(bool(torch.isin(x.kept(axis), index).all()) for x in args):
        return None
    if walk.values[node.args[0]].dtype != walk.values[node.args[1]].dtype:  # type: ignore[index]
        return None
    places = walk.parts.put_tensor(places_in(held, index), "index")
    here = walk.new.call_method("index_add_", (walk.fresh(wide, dim, index, written=True), dim, places, narrow.node))
    return live(here, wide.shape, axis, index)


def _spans(operand: Any, axis: int, units: int) -> bool:
    """Whether an operand has an entry of its own for each of the units."""
    return isinstance(operand, (Live, Tensor)) and len(operand.shape) >= -axis and operand.shape[axis] == units


def _brought(walk: Shrinking, operand: Any, axis: int, index: Tensor, units: int) -> Any:
    """An operand with these entries of the units' axis; whole where it has one entry for all of them."""
    if _spans(operand, axis, units):
        return walk.bring(operand, axis, index) if isinstance(operand, Live) else operand.index_select(axis, index)
    return walk.whole(operand) if isinstance(operand, Live) else operand


def _constant(walk: Shrinking, node: fx.Node, args: Any, kwargs: Any, axis: int, index: Tensor) -> float | None:
    """The one number that all left-out entries hold; None where it is not one, or not known."""
    units = walk.values[node].shape[axis]
    rest = torch.arange(units)[~torch.isin(torch.arange(units), index)]
    operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Live)]
    if any(x.axis != axis + len(x.shape) or x.fill is None for x in operands):
        return None

    def held(leaf: Any) -> Any:
        if isinstance(leaf, Live):
            return torch.tensor(leaf.fill, dtype=walk.dtype)
        return leaf.index_select(axis, rest) if _spans(leaf, axis, units) else leaf

    args, kwargs = map_leaves((args, kwargs), held)
    if node.target is A.where.self:
        args = (args[0].bool(), *args[1:])
    values = walk.worked_out(node, args, kwargs).unique()
    return float(values) if values.numel() == 1 and bool(values.isfinite()) else None


@shrinks(masked)
def behind_a_layer(walk: Shrinking, node: fx.Node, x: Live, mask: Tensor | None) -> Any:
    """A mask behind a layer: entries in use stay as they are, the others are left out."""
    if mask is None:
        return x
    cut, shape = walk.cut(node), walk.values[node].shape
    if cut is None:
        full = walk.whole(x)
        if bool(walk.open(node).all()):
            return full
        return Live(walk.new.call_function(torch.mul, (full.node, walk.as_node(mask))), shape)
    index = walk.kept(node, cut[0], [x])
    here = walk.bring(x, cut[0], index).node
    here = here if bool(walk.open(node).any()) else walk.new.call_function(torch.mul, (here, 0.0))
    return live(here, shape, cut[0], index)


@shrinks(A.dropout, A.feature_dropout, A.alpha_dropout, A.feature_alpha_dropout)
def dropout(walk: Shrinking, node: fx.Node, x: Any, p: float, train: bool) -> Any:
    """Dropout: idle in evaluation, unless its ``train`` says otherwise."""
    return entry_by_entry(walk, node, x, p, train) if train or not isinstance(x, Live) else x


@shrinks(A.clone, A.contiguous, A.alias)
def passed_on(walk: Shrinking, node: fx.Node, x: Any, **options: Any) -> Any:
    """Copies and aliases: the same entries in other memory."""
    return x


@shrinks(A.prelu)
def prelu(walk: Shrinking, node: fx.Node, x: Any, slopes: Any) -> Any:
    """Learned slopes, of all channels or of each."""
    if not isinstance(x, Live) or not isinstance(slopes, Tensor) or not x.along(1):
        return NotImplemented
    kept = slopes if len(slopes) == 1 else slopes[x.kept(1)]
    return x.at(walk.emit(node, (x, kept), {}), x.shape)


@shrinks(*POOLS)
def pooled(walk: Shrinking, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Pooling over positions: each channel by itself, so that the others are not missed."""
    positions = 2 if "2d" in str(node.target) else 3 if "3d" in str(node.target) else 1
    results = [node] if node in walk.values else list(node.users)
    places = any(result is not node and result.args[1] for result in results)  # where the largest entries lie
    if not isinstance(x, Live) or x.axis is None or x.fill != 0 or places or x.axis >= len(x.shape) - positions:
        return NotImplemented
    here = walk.emit(node, (x, *args), kwargs)
    shape = walk.values[results[0]].shape
    if node in walk.values:
        return x.at(here, shape)
    return (x.at(walk.new.call_function(operator.getitem, (here, 0)), shape),)


@shrinks(A.mean, A.sum, A.amax, A.amin, A.std, A.var, A.norm, A.linalg_vector_norm)
def reduced(walk: Shrinking, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Reductions: over other axes zeros stay zeros, and a sum over the cut axis can leave zeros out."""
    name = str(node.target).split(".")[1]
    if not isinstance(x, Live) or x.axis is None or node not in walk.values:
        return NotImplemented
    dims, shape = walk_dims(node, len(x.shape)), walk.values[node].shape
    if dims is None or (x.fill != 0 and name not in ("mean", "amax", "amin")):
        return NotImplemented
    if x.axis in dims:
        return Live(walk.emit(node, (x, *args), kwargs), shape) if name == "sum" and x.fill == 0 else NotImplemented
    axis = x.axis if len(shape) == len(x.shape) else x.axis - sum(dim < x.axis for dim in dims)
    return x.at(walk.emit(node, (x, *args), kwargs), shape, axis)


@shrinks(*MOVES, A.index)
def moved(walk: Shrinking, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Moves of entries, tried out on their numbers: the kept ones must come out in the order of the full network.

    The full value is filled with its entries' numbers and moved, and so is the cut one: where the second result is the
    first without some entries of one axis, the operation commutes with the cut.
    """
    if not isinstance(x, Live) or x.axis is None or x.index is None or depends_on_the_input(args, kwargs):
        return NotImplemented
    places = torch.arange(x.shape.numel()).reshape(x.shape)
    numbers = places.index_select(x.axis, x.index)
    is_kept = torch.zeros(places.numel(), dtype=torch.bool)
    is_kept[numbers.reshape(-1)] = True
    goal = walk.worked_out(node, (places, *args), kwargs)
    goals = _parts(goal)
    for a, k in _candidates(x, goals, is_kept, args, kwargs):
        try:
            found = _parts(walk.worked_out(node, (numbers, *a), k))
        except (RuntimeError, ValueError, IndexError):
            continue
        lays = [_lies(goal, part, is_kept) for goal, part in zip(goals, found, strict=False)]
        if len(found) == len(goals) and None not in lays and not _of_samples(walk, node, lays):
            here = walk.emit(node, (x, *a), k)
            if isinstance(goal, Tensor):
                return live(here, goal.shape, *lays[0], x.fill)  # type: ignore[misc, call-arg]
            nodes = [walk.new.call_function(operator.getitem, (here, number)) for number in range(len(goals))]
            made = zip(nodes, goals, lays, strict=True)
            return tuple(live(part, whole.shape, *lay, x.fill) for part, whole, lay in made)  # type: ignore[misc, call-arg]
    return _picked(walk, node, x, places, goals)


def _of_samples(walk: Shrinking, node: fx.Node, lays: Sequence[Any]) -> bool:
    """Tell whether entries are left out along an axis that samples and units share (samples × attention heads, say)."""
    results = {0: node} if node in walk.values else {user.args[1]: user for user in node.users}
    return any(number in results and lay[0] in walk.program.samples[results[number]] for number, lay in enumerate(lays))


def _parts(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _lies(goal: Tensor, found: Tensor, is_kept: Tensor) -> tuple[int | None, Tensor | None] | None:
    """Axis along which entries of the full result are missing, and the places of the others; None: no such cut."""
    if torch.equal(goal, found):
        return None, None
    axes = [axis for axis in range(goal.dim()) if found.dim() == goal.dim() and found.shape[axis] != goal.shape[axis]]
    if len(axes) != 1 or not found.numel() or int(is_kept[goal].sum()) != found.numel():
        return None
    lines = [part.movedim(axes[0], 0).reshape(part.shape[axes[0]], -1)[:, 0].tolist() for part in (goal, found)]
    places = {number: place for place, number in enumerate(lines[0])}
    index = torch.tensor([places.get(number, 0) for number in lines[1]])
    same = len(places) == len(lines[0]) and torch.equal(goal.index_select(axes[0], index), found)
    return (axes[0], index) if same else None


def _candidates(x: Live, goals: list[Tensor], is_kept: Tensor, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Arguments to try: as they are, and with the sizes of cut axes instead of the full sizes."""
    cuts = [(goal, one_axis(is_kept[goal], goal)) for goal in goals]
    sizes = {goal.shape[cut[0]]: len(cut[1]) for goal, cut in cuts if cut is not None}

    def smaller(leaf: Any) -> Any:
        return sizes.get(leaf, leaf) if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf

    return [(args, kwargs), map_leaves((args, kwargs), smaller)]


def _picked(walk: Shrinking, node: fx.Node, x: Live, places: Tensor, goals: list[Tensor]) -> Any:
    """Parts of the cut axis (a split, a slice): each takes the kept entries among its own."""
    assert x.axis is not None
    assert x.index is not None
    results = []
    for goal in goals:
        if goal.dim() != places.dim() or not goal.numel():
            return NotImplemented
        entries = goal.movedim(x.axis, 0).reshape(goal.shape[x.axis], -1)[:, 0] // places.stride(x.axis)
        entries = entries % places.shape[x.axis]
        picked = places.index_select(x.axis, entries)
        if picked.shape != goal.shape or not torch.equal(picked, goal):
            return NotImplemented
        at = nonzero(torch.isin(entries, x.index))
        part = walk.bring(x, x.axis, entries[at])
        results.append(live(part.node, goal.shape, x.axis, at, x.fill))
    return results[0] if node in walk.values else tuple(results)


@shrinks(A.cat, A.concat, A.concatenate)
def joined(walk: Shrinking, node: fx.Node, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Concatenation along the axis of which entries are left out, or along another."""
    if node not in walk.values or not all(isinstance(part, (Live, Tensor)) for part in tensors):
        return NotImplemented
    shape, values = walk.values[node].shape, [part for part in tensors if isinstance(part, Live)]
    along, axes = dim % len(shape), {v.axis for v in values if v.axis is not None}
    fills = {v.fill for v in values if v.axis is not None}
    if len(axes) != 1 or len(fills) != 1:
        return NotImplemented
    axis, fill = axes.pop(), None if walk.values[node].masked is Masked.DIRTY else fills.pop()
    if axis == along:
        starts = torch.tensor([0, *(part.shape[axis] for part in tensors)]).cumsum(0).tolist()
        held = [part.kept(axis) if isinstance(part, Live) else torch.arange(part.shape[axis]) for part in tensors]
        index = torch.cat([kept + start for kept, start in zip(held, starts, strict=False)])
        return live(walk.emit(node, (list(tensors), along), {}), shape, axis, index, fill)
    index = walk.kept(node, axis, values)
    brought = [_brought(walk, part, axis - len(shape), index, shape[axis]) for part in tensors]
    return live(walk.emit(node, (brought, along), {}), shape, axis, index, fill)


@shrinks(A.pad, A.constant_pad_nd)
def padded(
    walk: Shrinking, node: fx.Node, x: Any, pad: Sequence[int], mode: str | float = "constant", value: Any = None
) -> Any:
    """Padding with zeros around other axes; around the cut axis the zeros are left out as well."""
    if mode not in ("constant", 0) or value:
        return NotImplemented
    if not isinstance(x, Live) or x.axis is None or x.index is None or x.fill != 0:
        return NotImplemented
    pad, place = list(pad), 2 * (len(x.shape) - 1 - x.axis)
    before, behind = pad[place : place + 2] if place < len(pad) else (0, 0)
    if before < 0 or behind < 0:
        return NotImplemented
    pad[place : place + 2] = [0, 0] if place < len(pad) else []
    here = walk.emit(node, (x, pad), {}) if any(pad) else x.node
    return live(here, walk.values[node].shape, x.axis, x.index + before)
