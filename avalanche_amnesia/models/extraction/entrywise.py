"""Functions of single entries, sums and products: they need the kept entries alone."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.models.extraction.layout import Live, common, live, nonzero, union
from avalanche_amnesia.models.extraction.reading import entries_read
from avalanche_amnesia.models.extraction.shrinking import Shrinking, shrinks
from avalanche_amnesia.models.rules import arithmetic, elementwise
from avalanche_amnesia.models.trees import leaves, map_leaves

_PRODUCTS = {arithmetic.multiplied, arithmetic.divided}


@shrinks(elementwise.keeps_zero, elementwise.lifts)
def entry_by_entry(walk: Shrinking, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """``f(x)``; the entries that are left out hold ``f`` of what they held."""
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, (Live, Tensor))]
    if len(given) != 1 or not isinstance(given[0], Live):
        return NotImplemented
    x = given[0]
    here, full = walk.emit(node, args, kwargs), walk.on_meta(node, *args, **kwargs)
    if x.axis is None or x.fill is None:
        return x.at(here, full)
    constant = torch.tensor(x.fill, dtype=x.dtype)
    held = walk.worked_out(node, args, kwargs, lambda leaf: constant if leaf is x else leaf)
    return live(here, full, x.axis, x.index, float(held))


@shrinks(elementwise.prelu)
def prelu(walk: Shrinking, node: fx.Node, x: Live) -> Any:
    """Learned slopes, of all channels or of each."""
    slopes: Any = walk.module(node).weight
    if x.axis is not None and (not x.along(1) or (len(slopes) > 1 and len(slopes) != x.shape[1])):
        return NotImplemented
    kept = slopes if len(slopes) == 1 else slopes[x.kept(1)]
    made = nn.PReLU(len(kept))
    made.weight = nn.Parameter(kept.detach().clone())
    key = ("prelu", slopes, tuple(x.kept(1).tolist()))
    return x.at(walk.new.call_module(walk.parts.put_module(str(node.target), made, key), (x.node,)))


@shrinks(arithmetic.added, arithmetic.multiplied, arithmetic.divided, torch.maximum, torch.minimum)
def together(walk: Shrinking, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """A sum, product or quotient of two operands."""
    operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, (Live, Tensor))]
    full = walk.on_meta(node, *args, **kwargs)
    dim = full[0].dim()
    product = walk.rule_of_units(node) in _PRODUCTS
    axes = {o.axis - o.dim for o in operands if isinstance(o, Live) and o.axis is not None}
    if not axes and product:
        axes = {axis for o in operands if isinstance(o, Tensor) for axis in _axes_with_zeros(o)}
    if len(axes) != 1:
        return NotImplemented
    axis = axes.pop()
    units = full[0].shape[axis]
    if units == 1:
        return NotImplemented
    numerator = args[0] if walk.rule_of_units(node) is arithmetic.divided else None
    fill: float | None = 0.0
    kept: Tensor | None = None
    if product:
        for operand in operands:
            if numerator is None or operand is numerator:
                kept = _both(kept, _open(operand, axis, units))
    if kept is None:
        kept, fill = _unmasked(walk, node, operands, axis, units, args, kwargs)
    if len(kept) == units and all(not isinstance(o, Live) or o.axis is None for o in operands):
        return NotImplemented
    if product and (same := _times_one(walk, operands, axis, kept, full)) is not None:
        return live(same, full, axis % dim, kept, fill)
    if walk.rule_of_units(node) is arithmetic.added:
        summed = _added_into(walk, node, args, kwargs, axis, kept)
        if summed is not None:
            return live(summed, full, axis % dim, kept, fill)
    brought: dict[int, Any] = {id(o): _bring(walk, o, axis, kept, units) for o in operands}

    def arranged(leaf: Any) -> Any:
        return brought.get(id(leaf), leaf) if isinstance(leaf, (Live, Tensor)) else leaf

    here = walk.emit(node, *map_leaves((args, kwargs), arranged))
    return live(here, full, axis % dim, kept, fill)


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return common(first, second)


def _axes_with_zeros(mask: Tensor) -> list[int]:
    """Axes (from the right) along which a constant is zero as a whole somewhere."""
    found = []
    for axis in range(mask.dim()):
        others = [dim for dim in range(mask.dim()) if dim != axis]
        if mask.shape[axis] > 1 and not bool(((mask != 0).sum(others) > 0 if others else mask != 0).all()):
            found.append(axis - mask.dim())
    return found


def _open(operand: Live | Tensor, axis: int, units: int) -> Tensor | None:
    """The entries of an axis outside which a factor is zero; None where it says nothing."""
    if isinstance(operand, Live):
        return operand.index if operand.axis is not None and operand.fill in (0.0, None) else None
    if operand.dim() < -axis or operand.shape[axis] != units or axis not in _axes_with_zeros(operand):
        return None
    others = [dim for dim in range(operand.dim()) if dim != axis % operand.dim()]
    return nonzero((operand != 0).sum(others) if others else operand)


def _unmasked(
    walk: Shrinking, node: fx.Node, operands: list[Any], axis: int, units: int, args: Any, kwargs: Any
) -> tuple[Tensor, float | None]:
    """What is kept of a result that is zero under no mask alone, and what its other entries hold."""
    whole = torch.arange(units)
    kept = torch.empty(0, dtype=torch.long)
    for index in sorted((o.index for o in operands if isinstance(o, Live) and o.index is not None), key=len)[::-1]:
        kept = union(kept, index, units)
    wanted = entries_read(walk, node, axis)
    if wanted is not None and bool(torch.isin(nonzero(wanted), kept).all()):
        return nonzero(wanted), None
    if any(isinstance(o, Live) and o.axis is None for o in operands) or len(kept) == units:
        return whole, 0.0
    rest = whole[~torch.isin(whole, kept)]

    def held(leaf: Any) -> Any:
        if isinstance(leaf, Live):
            return torch.tensor(float("nan") if leaf.fill is None else leaf.fill, dtype=leaf.dtype)
        if isinstance(leaf, Tensor) and leaf.dim() >= -axis and leaf.shape[axis] == units:
            return leaf.index_select(axis, rest.to(leaf.device))
        return leaf

    values = walk.worked_out(node, args, kwargs, held).unique()
    return (kept, float(values)) if values.numel() == 1 and bool(values.isfinite()) else (whole, 0.0)


def _times_one(walk: Shrinking, operands: list[Any], axis: int, kept: Tensor, full: Any) -> fx.Node | None:
    """Where one factor is a mask that is 1 wherever it is kept, the other factor is the product."""
    values = [o for o in operands if isinstance(o, Live)]
    masks = [o for o in operands if isinstance(o, Tensor)]
    if len(values) != 1 or len(masks) != 1 or values[0].shape != full[0].shape or values[0].dtype != full[0].dtype:
        return None
    mask = masks[0]
    cut = mask.index_select(axis, kept) if mask.dim() >= -axis and mask.shape[axis] > 1 else mask
    return walk.bring(values[0], kept, axis).node if bool((cut == 1).all()) else None


def _added_into(walk: Shrinking, node: fx.Node, args: Any, kwargs: Any, axis: int, kept: Tensor) -> fx.Node | None:
    """A sum of two values that lack different entries: the narrower one is added into the wider one's places.

    None for any other sum.
    """
    if node.target not in _SUMS or kwargs or len(args) != 2 or not all(isinstance(x, Live) for x in args):
        return None
    wide, narrow = sorted(args, key=lambda x: -len(x.kept(axis)))
    if wide.shape != narrow.shape or wide.dtype != narrow.dtype or wide.fill != 0 or narrow.fill != 0:
        return None
    if len(narrow.kept(axis)) == len(kept) or not bool(torch.isin(narrow.kept(axis), kept).all()):
        return None
    axis %= wide.dim
    places = walk.places(narrow.kept(axis), kept)
    return walk.new.call_method("index_add_", (walk.fresh(wide, kept, axis), axis, places, narrow.node))


_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")


def _bring(walk: Shrinking, operand: Any, axis: int, kept: Tensor, units: int) -> Any:
    if isinstance(operand, Tensor):
        spread = operand.dim() >= -axis and operand.shape[axis] == units
        return operand.index_select(axis, kept.to(operand.device)) if spread else operand
    spread = operand.dim >= -axis and operand.shape[axis] == units
    return walk.bring(operand, kept, axis) if spread else operand
