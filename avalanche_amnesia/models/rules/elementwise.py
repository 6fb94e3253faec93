"""Functions of single entries: zero stays zero, or becomes a constant."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from avalanche_amnesia.models.findings import Refused
from avalanche_amnesia.models.registry import MAY_RETURN_ITSELF, rule
from avalanche_amnesia.models.rules.arithmetic import multiply
from avalanche_amnesia.models.trees import leaves
from avalanche_amnesia.models.values import Masked, ParameterValue, Value
from avalanche_amnesia.models.walk import Walk

_KEEP_ZERO_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.RReLU),
    *(nn.Hardswish, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
_KEEP_ZERO = (
    *(F.relu, F.relu_, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.tanh, F.rrelu),
    *(F.hardswish, F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, torch.relu, torch.relu_, torch.tanh),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout),
    *(torch.abs, torch.neg, torch.sin, torch.tan, torch.asin, torch.atan, torch.sinh, torch.asinh, torch.erf),
    *(torch.expm1, torch.log1p, torch.square, torch.sign, torch.round, torch.floor, torch.ceil),
    *(torch.trunc, torch.nan_to_num, torch.clone, operator.neg, abs, operator.abs),
    *("relu", "relu_", "tanh", "tanh_", "abs", "neg", "sin", "square", "sign", "erf", "expm1", "log1p"),
    *("contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "to", "type", "type_as", "round"),
    *("nan_to_num", "requires_grad_", "cpu"),
)
_SAME_VALUES = {"contiguous", "clone", "to", "type_as", "float", torch.clone}
_LIFT_MODULES = (
    *(nn.Sigmoid, nn.Hardsigmoid, nn.Softplus, nn.LogSigmoid, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.Hardtanh, nn.Threshold),
)
_LIFT = (
    *(F.sigmoid, torch.sigmoid, F.hardsigmoid, F.softplus, F.logsigmoid, F.hardtanh, F.alpha_dropout, F.threshold),
    *(torch.exp, torch.cos, torch.cosh, torch.clamp, torch.clip, torch.erfc, torch.special.expit),
    *("sigmoid", "sigmoid_", "exp", "cos", "cosh", "clamp", "clip", "clamp_min", "clamp_max", "clamp_", "masked_fill"),
)


MAY_RETURN_ITSELF |= {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, F.dropout, F.dropout1d, F.dropout2d}
MAY_RETURN_ITSELF |= {F.dropout3d, torch.dropout, "contiguous", "detach", "to", "type", "type_as", "float", "double"}
MAY_RETURN_ITSELF |= {"half", "bfloat16", "cpu", "DropPath", "StochasticDepth", "DropBlock2d"}


@rule(*_KEEP_ZERO_MODULES, *_KEEP_ZERO, "DropPath", "StochasticDepth", "DropBlock2d")
def keeps_zero(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Any:
    """``f(0) = 0`` entry by entry: a masked unit stays zero."""
    if isinstance(x, ParameterValue) and node.target in _SAME_VALUES:
        return x
    value = _tensor(x, options)
    if node.target not in _SAME_VALUES and _meets_others(value, x, rest, options):
        return walk.anything(node)
    return value if node.op == "call_module" else value.like_dtype(walk.run_on_meta(node).dtype)


@rule(*_LIFT_MODULES, *_LIFT)
def lifts(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Value:
    """``f(0) ≠ 0`` entry by entry: a masked unit becomes a constant."""
    value = _tensor(x, options)
    if _meets_others(value, x, rest, options):
        return walk.anything(node)
    return value.like(masked=Masked.CONSTANT)


@rule(nn.PReLU)
def prelu(walk: Walk, node: fx.Node, x: Value) -> Value:
    """Learned slopes: multiplied in entry by entry."""
    slopes = walk.whole(f"{node.target}.weight")
    shape = (-1, *(1,) * (x.ids.dim() - 2))
    return multiply(walk, x, type(slopes)(slopes.name, slopes.index.reshape(shape), slopes.dtype, slopes.frozen))


@rule(
    *(torch.log, torch.log2, torch.log10, torch.reciprocal, torch.rsqrt, torch.sqrt),
    *("log", "log2", "log10", "reciprocal", "rsqrt", "sqrt"),
)
def has_pole(walk: Walk, node: fx.Node, x: Any) -> Value:
    """``f(0)`` or its slope is infinite, which leaves no gradient: refused where a mask makes zeros."""
    value = _tensor(x, {})
    if value.masked is Masked.ZERO and not value.always:
        raise Refused("masked units are zero, where this function or its slope is infinite", "add a small number first")
    return value.like(masked=Masked.CONSTANT)


def _meets_others(value: Value, *arguments: Any) -> bool:
    """Whether bounds, masks and the like are values or parameters themselves."""
    return any(isinstance(leaf, (Value, ParameterValue)) and leaf is not value for leaf in leaves(arguments))


def _tensor(x: Any, options: dict[str, Any]) -> Value:
    found = options.get("input", x) if not isinstance(x, Value) else x
    if not isinstance(found, Value):
        raise Refused(
            "a parameter goes through a function before it is used",
            "use it as it is, or declare it frozen=[…] (trained by the first task alone)",
        )
    return found
