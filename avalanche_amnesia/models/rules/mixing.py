"""Operations that mix entries: reductions, matrix products, attention."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from avalanche_amnesia.models.findings import Refused
from avalanche_amnesia.models.registry import Fallback, rule
from avalanche_amnesia.models.rules.weighted import connect
from avalanche_amnesia.models.units import ALWAYS
from avalanche_amnesia.models.values import Masked, ParameterValue, Value
from avalanche_amnesia.models.walk import Walk

_WITH_ORDER = (torch.norm, torch.linalg.vector_norm, "norm")
"""They take the order of the norm in front of the axes."""


@rule(torch.mean, torch.sum, torch.amax, torch.amin, torch.std, torch.var, "mean", "sum", "amax", "amin", "std", "var")
@rule(*_WITH_ORDER)
def reduced(walk: Walk, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    """In use where any of the entries is that it is taken over."""
    result = walk.run_on_meta(node)
    if not isinstance(x, Value) or not isinstance(result, Tensor):
        return walk.anything(node)
    dims = reduced_dims(x.ids.shape, args[1:] if node.target in _WITH_ORDER else args, options)
    if dims is None:
        return walk.anything(node)
    if 0 in dims and len(x.ids) == 2:
        raise Refused("it mixes the samples of a batch", "leave the first dimension alone")
    ids = walk.book.sets.over(x.ids, dims, keepdim=len(result.shape) == x.ids.dim())
    return Value(ids, result.dtype, x.masked)


def reduced_dims(shape: torch.Size, args: tuple[Any, ...], options: dict[str, Any]) -> list[int] | None:
    """The axes that a reduction is taken over; None where that is every axis, or none that is known."""
    named = options.get("dim", options.get("axis"))
    found = [named] if named is not None else [a for a in args if isinstance(a, (int, tuple, list))][:1]
    if not found or isinstance(found[0], bool) or found[0] in ((), []):
        return None
    dims = [found[0]] if isinstance(found[0], int) else list(found[0])
    return sorted({dim % len(shape) for dim in dims})


@rule(torch.matmul, torch.bmm, torch.mm, operator.matmul, "matmul", "bmm", "mm", "__matmul__")
def product(walk: Walk, node: fx.Node, a: Any, b: Any) -> Any:
    """A sum of products: zero where all of them are. With a parameter it is a layer."""
    if isinstance(a, Value) and isinstance(b, ParameterValue) and b.index.dim() == 2:
        walk.zero_inputs(node)
        return connect(
            walk, node, a, b, None, kind="Linear", units=b.index.shape[1], unit_axis=1, input_axis=0, channel=-1
        )
    if not (isinstance(a, Value) and isinstance(b, Value)) or a.ids.dim() < 2 or b.ids.dim() < 2:
        return walk.anything(node)
    result = walk.run_on_meta(node)
    sets = walk.book.sets
    options = [
        ids.expand(result.shape)
        for value, ids in (
            (b, sets.over(b.ids, [-2], keepdim=True)),
            (a, sets.over(a.ids, [-1], keepdim=True)),
        )
        if value.masked is Masked.ZERO
    ]
    if not options:
        return walk.anything(node)
    return Value(min(options, key=lambda ids: float((ids == ALWAYS).float().mean())), result.dtype)


@rule(F.scaled_dot_product_attention)
def attended(
    walk: Walk, node: fx.Node, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any
) -> Any:
    """A weighted mean of the values over positions: zero where the values' unit is masked."""
    mask = options.get("attn_mask", attn_mask)
    if isinstance(mask, ParameterValue):
        raise Refused("a learned attention bias is in no mask", "declare it frozen=[…] or task_owned=[…]")
    if isinstance(query, ParameterValue) or isinstance(key, ParameterValue):
        raise Refused("a learned query or key is in no mask", "declare it frozen=[…] or task_owned=[…]")
    if not isinstance(value, Value) or value.masked is not Masked.ZERO:
        return walk.anything(node)
    ids = walk.book.sets.over(value.ids, [-2], keepdim=True)
    return Value(ids.expand(walk.run_on_meta(node).shape), value.dtype)


@rule(F.normalize)
def scaled_to_norm(walk: Walk, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    """Divided by a number per row: zero stays zero."""
    return x if isinstance(x, Value) else walk.anything(node)


@rule(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d)
def probabilities(walk: Walk, node: fx.Node, x: Value) -> Any:
    """No mask reaches what a softmax returns."""
    return walk.anything(node)


@rule(Fallback.UNKNOWN_MODULE)
def module_without_rule(walk: Walk, node: fx.Node, *args: Any, **options: Any) -> Any:
    """A module of torch.nn without parameters or buffers is a function; any other needs a rule."""
    module = walk.module(node)
    if not list(module.parameters()) and not list(module.buffers()):
        return walk.anything(node)
    name = type(module).__name__
    raise Refused(
        f"{name} has no masking rule",
        f"declare it: MaskedModel(backbone, frozen=[{node.target!r}]) (trained by the first task alone) or "
        f"task_owned=[{node.target!r}] (a copy per task); or use layers of torch.nn that have one",
    )
