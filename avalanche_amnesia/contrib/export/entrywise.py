"""Rules for functions of single entries, sums and products: they need only the kept entries."""

from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.contrib.export.layout import Live, live, places_in
from avalanche_amnesia.contrib.export.shrinking import Shrinking, shrinks
from avalanche_amnesia.unit_graph.masking import masked
from avalanche_amnesia.unit_graph.rules.elementwise import KEEP_ZERO, LIFT, POLES, SAME_VALUES
from avalanche_amnesia.unit_graph.values import Masked, leaves, map_leaves

A: Any = torch.ops.aten


@shrinks(*SAME_VALUES, *KEEP_ZERO, *LIFT, *POLES, A.add, A.sub, A.rsub, A.subtract, A.mul, A.multiply, A.div)
@shrinks(A.true_divide, A.floor_divide, A.remainder, A.fmod, A.pow, A.addcmul, A.maximum, A.minimum, A.where, A.lerp)
def entry_by_entry(walk: Shrinking, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Any number of operands, as they broadcast; left-out entries hold the function of what they held before."""
    operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, (Live, Tensor))]
    if node not in walk.values:
        return NotImplemented
    value, cut = walk.values[node], walk.cut(node)
    if cut is None:
        if not bool(walk.open(node).all()):
            return NotImplemented
        return _added_into(walk, node, args, kwargs) or walk.as_it_was(node, args, kwargs, counted=False)
    axis = cut[0] - len(value.shape)
    index = walk.kept(node, axis, operands)
    fill = {Masked.ZERO: 0.0, Masked.DIRTY: None}.get(value.masked)
    if value.masked is Masked.CONSTANT:
        fill = _constant(walk, node, args, kwargs, axis, index)
        if fill is None:
            return NotImplemented
    summed = _added_into(walk, node, args, kwargs, axis, index)
    if summed is not None:
        return live(summed.node, value.shape, axis, index, fill)
    brought = {id(o): _bring(walk, o, axis, index, value.shape[axis]) for o in operands}
    here = walk.emit(node, *map_leaves((args, kwargs), lambda leaf: brought.get(id(leaf), leaf)))
    return live(here, value.shape, axis, index, fill)


def _spans(operand: Live | Tensor, axis: int, units: int) -> bool:
    return len(operand.shape) >= -axis and operand.shape[axis] == units


def _bring(walk: Shrinking, operand: Live | Tensor, axis: int, index: Tensor, units: int) -> Any:
    if isinstance(operand, Tensor):
        return operand.index_select(axis, index) if _spans(operand, axis, units) else operand
    return walk.bring(operand, axis, index) if _spans(operand, axis, units) else walk.whole(operand)


def _constant(walk: Shrinking, node: fx.Node, args: Any, kwargs: Any, axis: int, index: Tensor) -> float | None:
    """The one number that all left-out entries hold; None where it is not one, or not known."""
    units = walk.values[node].shape[axis]
    rest = torch.arange(units)[~torch.isin(torch.arange(units), index)]
    known = True

    def held(leaf: Any) -> Any:
        nonlocal known
        if isinstance(leaf, Live):
            known &= leaf.axis == axis + len(leaf.shape) and leaf.fill is not None
            return torch.tensor(leaf.fill or 0.0, dtype=walk.dtype)
        return leaf.index_select(axis, rest) if isinstance(leaf, Tensor) and _spans(leaf, axis, units) else leaf

    args, kwargs = map_leaves((args, kwargs), held)
    if not known:
        return None
    if node.target is A.where.self:
        args = (args[0].bool(), *args[1:])
    values = walk.worked_out(node, args, kwargs).unique()
    return float(values) if values.numel() == 1 and bool(values.isfinite()) else None


def _added_into(
    walk: Shrinking, node: fx.Node, args: Any, kwargs: Any, axis: int | None = None, index: Tensor | None = None
) -> Live | None:
    """Sum of two values that lack different entries, the narrower added into the wider; None for any other sum."""
    if node.target is not A.add.Tensor or kwargs or not all(isinstance(x, Live) and x.fill == 0 for x in args):
        return None
    if axis is None:
        axis = next((x.axis - len(x.shape) for x in args if x.axis is not None), None)
    if axis is None or args[0].shape != args[1].shape or any(x.axis not in (None, axis + len(x.shape)) for x in args):
        return None
    index = torch.arange(args[0].shape[axis]) if index is None else index
    wide, narrow = sorted(args, key=lambda x: -len(x.kept(axis)))
    held, dim = narrow.kept(axis), axis + len(wide.shape)
    if len(held) == len(index) or not all(bool(torch.isin(x.kept(axis), index).all()) for x in args):
        return None
    if walk.values[node.args[0]].dtype != walk.values[node.args[1]].dtype:  # type: ignore[index]
        return None
    places = walk.parts.put_tensor(places_in(held, index), "index")
    here = walk.new.call_method("index_add_", (walk.fresh(wide, dim, index, written=True), dim, places, narrow.node))
    return live(here, wide.shape, axis, index)


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
    found = walk.bring(x, cut[0], walk.kept(node, cut[0], [x]))
    here = found.node if bool(walk.open(node).any()) else walk.new.call_function(torch.mul, (found.node, 0.0))
    return live(here, shape, cut[0], found.kept(cut[0]))


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
