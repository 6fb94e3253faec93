"""Rules for elementwise operations: sums, products, and functions of single entries."""

from functools import reduce
from typing import Any

import torch
from torch import fx

from avalanche_amnesia.unit_graph.findings import Unsupported
from avalanche_amnesia.unit_graph.values import ALWAYS, Masked, ParameterValue, Value, filled, leaves
from avalanche_amnesia.unit_graph.walk import Walk, rule

A: Any = torch.ops.aten

SAME_VALUES = (
    *(A.clone, A.contiguous, A.detach, A.alias, A.to, A._to_copy, A.type_as, A.lift_fresh_copy, A.lift_fresh),
    A.positive,
)
"""Operations that keep all entries, in other memory or another type."""
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


@rule(A.add, A.sub, A.rsub, A.subtract)
def add(walk: Walk, node: fx.Node, a: Any, b: Any, *rest: Any, **options: Any) -> Value:
    """Trace units through a sum or difference: an entry depends on the units of both operands' entries."""
    if isinstance(a, Value) and isinstance(b, Value):
        return Value(walk.draft.sets.union(a.ids, b.ids), max(a.masked, b.masked))
    x, other = (a, b) if isinstance(a, Value) else (b, a)
    return _with_constant_or_parameter(walk, x, other, Masked.CONSTANT)


@rule(A.mul, A.multiply)
def multiply(walk: Walk, node: fx.Node, a: Any, b: Any) -> Value:
    """Return the units that a product depends on: those of one factor, because the product is 0 where the factor is."""
    if isinstance(a, Value) and isinstance(b, Value):
        shape = torch.broadcast_shapes(a.shape, b.shape)
        # Zero if one factor is. Prefer the factor that is zero under more masks, then the larger one.
        zero = [v for v in (a, b) if v.masked is Masked.ZERO]
        if not zero:
            return Value(walk.draft.sets.union(a.ids, b.ids), max(a.masked, b.masked))
        best = min(zero, key=lambda v: (float((v.ids == ALWAYS).float().mean()), -v.ids.numel()))
        return Value(best.ids.expand(shape))
    x, other = (a, b) if isinstance(a, Value) else (b, a)
    return _with_constant_or_parameter(walk, x, other, None)


def _with_constant_or_parameter(walk: Walk, x: Any, other: Any, if_constant: Masked | None) -> Value:
    """Return the traced result of an elementwise operation of ``x`` and ``other``, a constant or a parameter."""
    if_constant = x.masked if if_constant is None else if_constant  # a product leaves masked entries unchanged
    if isinstance(other, ParameterValue):
        shape = torch.broadcast_shapes(x.shape, other.shape)
        met = max(x.masked, assign_units(walk, other, x.ids.expand(shape)))
        # Zero times another task's parameter is +0 or -0, by the parameter's sign: mask it again.
        zero = x.masked is Masked.ZERO and if_constant is Masked.ZERO and met is Masked.CONSTANT
        return Value(x.ids.expand(shape), Masked.ZERO if zero else met)
    shape = torch.broadcast_shapes(x.shape, other.shape) if isinstance(other, torch.Tensor) else x.shape
    return Value(x.ids.expand(shape), max(x.masked, if_constant))


def assign_units(walk: Walk, parameter: ParameterValue, ids: torch.Tensor) -> Masked:
    """Record which units use each parameter entry; return DIRTY if later tasks can change them, else CONSTANT."""
    if not parameter.owned:
        places = torch.arange(parameter.shape.numel()).reshape(parameter.shape)
        met = walk.draft.sets.merge(places, filled(ids), parameter.shape.numel()).reshape(parameter.shape)
        walk.draft.record(parameter, met)
    return Masked.CONSTANT if parameter.fixed else Masked.DIRTY


@rule(A.div, A.true_divide, A.floor_divide, A.remainder, A.fmod)
def divide(walk: Walk, node: fx.Node, a: Any, b: Any, **options: Any) -> Value:
    """Trace units through a quotient: an entry is zero where the numerator is zero."""
    if isinstance(b, Value):
        if b.masked is Masked.ZERO and not b.always:
            raise Unsupported("masked units are zero, and divided by", "add a small number to the denominator first")
        if not isinstance(a, Value):  # masked entries are a number divided by a constant, as after a sum
            return add(walk, node, a, b)
    return multiply(walk, node, a, b)


@rule(A.pow)
def power(walk: Walk, node: fx.Node, a: Any, b: Any) -> Any:
    """Trace units through ``a ** b``; raise Unsupported if its value or slope is infinite at masked entries (0)."""
    if isinstance(a, Value) and isinstance(b, (int, float)):
        if b >= 1:
            return a
        if b != 0 and a.masked is Masked.ZERO and not a.always:
            raise Unsupported(
                "masked units are zero, where this power or its slope is infinite", "add a small number first"
            )
        return a.like(masked=max(a.masked, Masked.CONSTANT))
    if isinstance(b, Value) and isinstance(a, (int, float)):
        return b.like(masked=max(b.masked, Masked.CONSTANT))
    return walk.conservative(node)


@rule(A.addcmul)
def addcmul(walk: Walk, node: fx.Node, a: Any, b: Any, c: Any, **options: Any) -> Any:
    """Trace units through ``a + value · b · c``, as through a product and a sum."""
    if not isinstance(b, Value) and not isinstance(c, Value):
        return walk.conservative(node)
    return add(walk, node, a, multiply(walk, node, b, c))


@rule(A.maximum, A.minimum)
def maximum(walk: Walk, node: fx.Node, a: Any, b: Any) -> Any:
    """Trace units through a maximum or minimum: an entry depends on both values' units, and is zero where both are."""
    if not isinstance(a, Value) or not isinstance(b, Value):
        return walk.conservative(node)
    return add(walk, node, a, b)


@rule(A.where)
def select(walk: Walk, node: fx.Node, condition: Any, a: Any, b: Any) -> Any:
    """Trace units through ``torch.where``: an entry depends on the units of both operands and of the condition."""
    values = [x for x in (condition, a, b) if isinstance(x, Value)]
    if any(isinstance(x, ParameterValue) for x in (condition, a, b)):
        return walk.conservative(node)
    ids = reduce(walk.draft.sets.union, (value.ids for value in values))
    kept = all(isinstance(x, Value) and x.masked is Masked.ZERO for x in (a, b))
    masked = max([v.masked for v in values] + ([] if kept else [Masked.CONSTANT]))
    if kept and isinstance(condition, Value):  # zero for either choice
        masked = max(x.masked for x in (a, b))
    return Value(ids.expand(walk.result(node).shape), masked)


# Functions of single entries --------------------------------------------------------------------------------------


@rule(*SAME_VALUES, *KEEP_ZERO)
def zero_preserving(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Any:
    """Return the traced result of a function with ``f(0) = 0``: the units of ``x``; masked entries stay zero."""
    if not isinstance(x, Value) or _has_varying_argument(rest, options):
        return walk.conservative(node)
    return x


@rule(*LIFT)
def zero_to_constant(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Any:
    """Return the traced result of a function with ``f(0) ≠ 0``: the units of ``x``; masked entries are ``f(0)``."""
    if not isinstance(x, Value) or _has_varying_argument(rest, options) or walk.result(node).shape != x.shape:
        return walk.conservative(node)
    return x.like(masked=max(x.masked, Masked.CONSTANT))


@rule(A.prelu)
def prelu(walk: Walk, node: fx.Node, x: Any, slopes: Any) -> Any:
    """Return the traced result of PReLU, which counts as a product of ``x`` and learned slopes."""
    if not isinstance(x, Value) or not isinstance(slopes, ParameterValue):
        return walk.conservative(node)
    shape = (-1, *(1,) * (x.ids.dim() - 2))
    return multiply(walk, node, x, slopes.move_entries(lambda place: place.reshape(shape)))


@rule(*POLES)
def singular_at_zero(walk: Walk, node: fx.Node, x: Value) -> Value:
    """Trace a function that is singular at 0, such as ``log``; raise Unsupported if masked entries of ``x`` are 0."""
    if x.masked is Masked.ZERO and not x.always:
        raise Unsupported("masked units are zero, where this function or slope is infinite", "add a small number first")
    return x.like(masked=max(x.masked, Masked.CONSTANT))


def _has_varying_argument(*arguments: Any) -> bool:
    """Return True if any argument (a bound, a mask) is a parameter or computed from the input."""
    return any(isinstance(leaf, (Value, ParameterValue)) for leaf in leaves(arguments))
