"""Sums and products of values, parameters, constants and numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.models.findings import Refused
from avalanche_amnesia.models.registry import rule
from avalanche_amnesia.models.units import ALWAYS
from avalanche_amnesia.models.values import Masked, ParameterValue, Value, filled
from avalanche_amnesia.models.walk import Walk


@rule(operator.add, operator.iadd, torch.add, operator.sub, operator.isub, torch.sub, "add", "add_", "sub", "sub_")
@rule(torch.subtract, torch.rsub)
def added(walk: Walk, node: fx.Node, a: Any, other: Any, **options: Any) -> Value:
    """A sum, or a difference: in use where either is."""
    return add(walk, a, other)


def add(walk: Walk, a: Any, b: Any) -> Value:
    """The sum of two operands of which one is a value."""
    if isinstance(a, Value) and isinstance(b, Value):
        masked = max(a.masked, b.masked)
        return Value(walk.book.sets.union(a.ids, b.ids), torch.result_type(a.meta(), b.meta()), masked)
    x, other = (a, b) if isinstance(a, Value) else (b, a)
    return _beside(walk, x, other, Masked.CONSTANT)


@rule(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply")
def multiplied(walk: Walk, node: fx.Node, a: Any, other: Any) -> Value:
    """A product: zero where either factor is."""
    return multiply(walk, a, other)


def multiply(walk: Walk, a: Any, b: Any) -> Value:
    """The product of two operands of which one is a value."""
    if isinstance(a, Value) and isinstance(b, Value):
        shape = torch.broadcast_shapes(a.ids.shape, b.ids.shape)
        dtype = torch.result_type(a.meta(), b.meta())
        # Zero where one factor is; the one that is zero under more masks is worth more, then the one that spans more.
        zero = [v for v in (a, b) if v.masked is Masked.ZERO]
        if not zero:
            return Value(walk.book.sets.union(a.ids, b.ids), dtype, max(a.masked, b.masked))
        best = min(zero, key=lambda v: (float((v.ids == ALWAYS).float().mean()), -v.ids.numel()))
        return Value(best.ids.expand(shape), dtype)
    x, other = (a, b) if isinstance(a, Value) else (b, a)
    return _beside(walk, x, other, None)


def _beside(walk: Walk, x: Any, other: Any, with_constant: Masked | None) -> Value:
    """A value and something that is none: a parameter takes on the units of the value that it meets."""
    if not isinstance(x, Value):
        raise Refused(
            "parameters are combined with numbers or with each other before they are used",
            "use them as they are, one by one, or declare them frozen=[…]",
        )
    with_constant = x.masked if with_constant is None else with_constant  # a product leaves them as they are
    if isinstance(other, ParameterValue):
        shape = torch.broadcast_shapes(x.ids.shape, other.index.shape)
        met = adopt(walk, other, x.ids.expand(shape))
        # Zero times another task's parameter is zero, with the sign of that parameter: it is masked anew.
        zero = x.masked is Masked.ZERO and with_constant is Masked.ZERO and met is Masked.CONSTANT
        return Value(x.ids.expand(shape), x.dtype, Masked.ZERO if zero else met)
    shape = torch.broadcast_shapes(x.ids.shape, other.shape) if isinstance(other, Tensor) else x.ids.shape
    dtype = torch.result_type(x.meta(), other.to("meta") if isinstance(other, Tensor) else other)
    return Value(x.ids.expand(shape), dtype, max(x.masked, with_constant))


def adopt(walk: Walk, parameter: ParameterValue, ids: Tensor) -> Masked:
    """Note that a parameter's entries are used by the units of the entries that they meet.

    Returns:
        What the parameter leaves behind in masked entries.
    """
    if parameter.owned:
        return Masked.CONSTANT
    places = torch.arange(parameter.index.numel()).reshape(parameter.index.shape)
    of_entries = walk.book.sets.merge(places, filled(ids), parameter.index.numel()).reshape(parameter.index.shape)
    walk.used(parameter, of_entries)
    return Masked.CONSTANT if parameter.frozen else Masked.DIRTY


@rule(operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_", "true_divide")
@rule(operator.floordiv, operator.mod, torch.remainder, torch.fmod)
def divided(walk: Walk, node: fx.Node, a: Any, other: Any, **options: Any) -> Value:
    """A quotient: zero where the numerator is."""
    if isinstance(other, Value):
        if other.masked is Masked.ZERO and not other.always:
            raise Refused("masked units are zero, and are divided by", "add a small number to the denominator first")
        if not isinstance(a, Value):  # masked entries hold a number divided by a constant: as if that were added
            return add(walk, a, other)
    return multiply(walk, a, other)


@rule(operator.pow, torch.pow, "pow")
def power(walk: Walk, node: fx.Node, a: Any, b: Any) -> Value:
    """``x ** n`` keeps zeros for a number ``n > 0``."""
    if isinstance(a, Value) and isinstance(b, (int, float)) and b >= 1:
        return a
    if isinstance(a, Value) and isinstance(b, (int, float)):
        if b != 0 and a.masked is Masked.ZERO and not a.always:
            raise Refused(
                "masked units are zero, where this power or its slope is infinite", "add a small number first"
            )
        return a.like(masked=Masked.CONSTANT)
    if isinstance(b, Value) and isinstance(a, (int, float)):
        return b.like(masked=Masked.CONSTANT)
    raise Refused("a power of this kind has no masking rule", "use a number as the exponent")


@rule(torch.addcmul, "addcmul")
def addcmul(walk: Walk, node: fx.Node, a: Any, b: Any, c: Any, *, value: float = 1) -> Value:
    """``a + value · b · c``."""
    return add(walk, a, multiply(walk, b, c))
