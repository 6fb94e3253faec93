"""Functions of single entries: zero stays zero, or becomes a constant."""

from typing import Any

import torch
from torch import fx

from avalanche_amnesia.unit_graph.findings import Unsupported
from avalanche_amnesia.unit_graph.registry import rule
from avalanche_amnesia.unit_graph.rules.arithmetic import multiply
from avalanche_amnesia.unit_graph.values import Constant, Masked, ParameterValue, Value, leaves
from avalanche_amnesia.unit_graph.walk import Walk

A: Any = torch.ops.aten

SAME_VALUES = (
    *(A.clone, A.contiguous, A.detach, A.alias, A.to, A._to_copy, A.type_as, A.lift_fresh_copy, A.lift_fresh),
    A.positive,
)
"""The same entries, in other memory or another type."""
KEEP_ZERO = (
    *(A.relu, A.relu6, A.leaky_relu, A.elu, A.celu, A.selu, A.gelu, A.silu, A.mish, A.tanh, A.rrelu, A.hardswish),
    *(A.softshrink, A.hardshrink, A.dropout, A.feature_dropout, A.abs, A.neg, A.sin, A.tan, A.asin, A.atan, A.sinh),
    *(A.asinh, A.erf, A.expm1, A.log1p, A.square, A.sign, A.sgn, A.round, A.floor, A.ceil, A.trunc, A.frac),
    A.nan_to_num,
)
LIFT = (
    *(A.sigmoid, A.hardsigmoid, A.softplus, A.log_sigmoid, A.hardtanh, A.alpha_dropout, A.feature_alpha_dropout),
    *(A.threshold, A.exp, A.exp2, A.cos, A.cosh, A.erfc, A.clamp, A.clip, A.clamp_min, A.clamp_max, A.logical_not),
    *(A.eq, A.ne, A.lt, A.le, A.gt, A.ge, A.isnan, A.isinf, A.isfinite, A.special_expit, A.masked_fill),
)
POLES = (A.log, A.log2, A.log10, A.reciprocal, A.rsqrt, A.sqrt)


@rule(*SAME_VALUES, *KEEP_ZERO)
def keeps_zero(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Any:
    """Function with ``f(0) = 0``, entry by entry: a masked unit stays zero."""
    if not isinstance(x, Value) or _meets_others(x, rest, options):
        return walk.conservative(node)
    return x.like(dtype=walk.result(node).dtype)


@rule(*LIFT)
def lifts(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Any:
    """Function with ``f(0) ≠ 0``, entry by entry: a masked unit becomes a constant."""
    result = walk.result(node)
    if not isinstance(x, Value) or _meets_others(x, rest, options) or result.shape != x.shape:
        return walk.conservative(node)
    return x.like(masked=max(x.masked, Masked.CONSTANT), dtype=result.dtype)


@rule(A.prelu)
def prelu(walk: Walk, node: fx.Node, x: Any, slopes: Any) -> Any:
    """Learned slopes: multiplied in entry by entry."""
    if not isinstance(x, Value) or not isinstance(slopes, ParameterValue):
        return walk.conservative(node)
    shape = (-1, *(1,) * (x.ids.dim() - 2))
    return multiply(walk, x, slopes.moved(lambda place: place.reshape(shape)))


@rule(*POLES)
def has_pole(walk: Walk, node: fx.Node, x: Value) -> Value:
    """Function whose value or slope at 0 is infinite, which leaves no gradient: refused where a mask makes zeros."""
    if x.masked is Masked.ZERO and not x.always:
        raise Unsupported(
            "masked units are zero, where this function or its slope is infinite", "add a small number first"
        )
    return x.like(masked=max(x.masked, Masked.CONSTANT))


def _meets_others(value: Value, *arguments: Any) -> bool:
    """Tell whether bounds, masks and the like are values or parameters themselves, or make the result larger."""
    others = [leaf for leaf in leaves(arguments) if isinstance(leaf, (Value, ParameterValue, Constant))]
    return any(not isinstance(leaf, Constant) for leaf in others)
