"""Layers with weights: every output is a unit, in use where its mask and what feeds it are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from avalanche_amnesia.models.findings import Refused
from avalanche_amnesia.models.registry import rule
from avalanche_amnesia.models.units import ALWAYS, compact
from avalanche_amnesia.models.values import Masked, ParameterValue, Value
from avalanche_amnesia.models.walk import Walk

_CONVOLUTIONS: dict[Any, str] = {
    F.conv1d: "Conv1d",
    F.conv2d: "Conv2d",
    F.conv3d: "Conv3d",
    torch.conv1d: "Conv1d",
    torch.conv2d: "Conv2d",
    torch.conv3d: "Conv3d",
}
_TRANSPOSED: dict[Any, str] = {
    F.conv_transpose1d: "ConvTranspose1d",
    F.conv_transpose2d: "ConvTranspose2d",
    F.conv_transpose3d: "ConvTranspose3d",
}


@rule(nn.Linear, zeros=True)
def linear(walk: Walk, node: fx.Node, x: Value) -> Value:
    """``nn.Linear``: units along the last axis."""
    weight, bias = _parameters(walk, node)
    units = weight.index.shape[0]
    return connect(walk, node, x, weight, bias, kind="Linear", units=units, unit_axis=0, input_axis=1, channel=-1)


@rule(F.linear, zeros=True)
def functional_linear(walk: Walk, node: fx.Node, input: Any, weight: Any, bias: Any = None) -> Any:
    """``F.linear`` with a parameter, or a part of one."""
    if not isinstance(weight, ParameterValue):
        return walk.anything(node)
    units = weight.index.shape[0]
    return connect(walk, node, input, weight, bias, kind="Linear", units=units, unit_axis=0, input_axis=1, channel=-1)


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, zeros=True)
def convolution(walk: Walk, node: fx.Node, x: Value) -> Value:
    """``nn.Conv*d``: units along axis 1."""
    module = walk.module(node)
    weight, bias = _parameters(walk, node)
    return _convolve(walk, node, x, weight, bias, type(module).__name__, int(module.groups))  # type: ignore[arg-type]


@rule(*_CONVOLUTIONS, zeros=True)
def functional_convolution(
    walk: Walk,
    node: fx.Node,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """``F.conv*d`` with a parameter."""
    if not isinstance(weight, ParameterValue):
        return walk.anything(node)
    return _convolve(walk, node, input, weight, bias, _CONVOLUTIONS[node.target], groups)


def _convolve(walk: Walk, node: fx.Node, x: Any, weight: ParameterValue, bias: Any, kind: str, groups: int) -> Value:
    x = walk.value(x)
    units, per_group = weight.index.shape[:2]
    channels = groups * per_group
    inputs = walk.book.sets.over(x.ids, [dim for dim in range(x.ids.dim()) if dim != 1])
    ones = (1,) * (weight.index.dim() - 2)
    if groups == channels and groups > 1 and not bool((inputs == ALWAYS).any()):
        return _depthwise(walk, node, x, inputs, weight, bias, ones)
    layer = walk.book.layer(_layer_name(walk, weight), kind, units)
    by_group = inputs.reshape(groups, 1, per_group).expand(groups, units // groups, per_group)
    into = inputs.reshape(1, channels, *ones) if groups == 1 else by_group.reshape(units, per_group, *ones)
    walk.used(weight, layer.sets.reshape(units, 1, *ones), into)
    return _outputs(walk, node, x, layer.sets, bias, axis=1)


def _depthwise(
    walk: Walk, node: fx.Node, x: Value, inputs: Tensor, weight: ParameterValue, bias: Any, ones: Sequence[int]
) -> Value:
    """A depthwise unit is its input's unit: it has no mask of its own."""
    units = weight.index.shape[0]
    sets = inputs.repeat_interleave(units // len(inputs))
    walk.used(weight, sets.reshape(units, 1, *ones))
    value = _outputs(walk, node, x, sets, bias, axis=1)
    return value if isinstance(bias, ParameterValue) else value.like(masked=Masked.ZERO)


@rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, zeros=True)
def transposed(walk: Walk, node: fx.Node, x: Value, output_size: Any = None) -> Value:
    """``nn.ConvTranspose*d``: its weight lies ``(inputs, units/groups, …)``."""
    module = walk.module(node)
    weight, bias = _parameters(walk, node)
    return _transpose(walk, node, x, weight, bias, type(module).__name__, int(module.groups))  # type: ignore[arg-type]


@rule(*_TRANSPOSED, zeros=True)
def functional_transposed(
    walk: Walk,
    node: fx.Node,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """``F.conv_transpose*d`` with a parameter."""
    if not isinstance(weight, ParameterValue):
        return walk.anything(node)
    return _transpose(walk, node, input, weight, bias, _TRANSPOSED[node.target], groups)


def _transpose(walk: Walk, node: fx.Node, x: Any, weight: ParameterValue, bias: Any, kind: str, groups: int) -> Value:
    x = walk.value(x)
    channels, per_group = weight.index.shape[:2]
    units = groups * per_group
    inputs = walk.book.sets.over(x.ids, [dim for dim in range(x.ids.dim()) if dim != 1])
    ones = (1,) * (weight.index.dim() - 2)
    layer = walk.book.layer(_layer_name(walk, weight), kind, units)
    by_group = layer.sets.reshape(groups, 1, per_group).expand(groups, channels // groups, per_group)
    walk.used(weight, by_group.reshape(channels, per_group, *ones), inputs.reshape(channels, 1, *ones))
    return _outputs(walk, node, x, layer.sets, bias, axis=1)


@rule(nn.Embedding)
def embedding(walk: Walk, node: fx.Node, x: Value) -> Value:
    """``nn.Embedding``: a unit per dimension, fed by the network's input."""
    if walk.module(node).max_norm is not None:
        raise Refused("an Embedding with max_norm rescales its weights while it reads them", "leave max_norm out")
    return _embed(walk, node, x, walk.whole(f"{node.target}.weight"))


@rule(F.embedding)
def functional_embedding(
    walk: Walk, node: fx.Node, input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *rest: Any
) -> Any:
    """``F.embedding`` with a parameter."""
    if not isinstance(weight, ParameterValue) or max_norm is not None:
        return walk.anything(node)
    return _embed(walk, node, input, weight)


def _embed(walk: Walk, node: fx.Node, x: Any, weight: ParameterValue) -> Value:
    layer = walk.book.layer(_layer_name(walk, weight), "Embedding", weight.index.shape[1])
    walk.used(weight, layer.sets.reshape(1, -1))
    result = walk.run_on_meta(node)
    return Value(layer.sets.expand(result.shape), result.dtype, Masked.DIRTY)


def connect(
    walk: Walk,
    node: fx.Node,
    x: Any,
    weight: ParameterValue,
    bias: Any,
    *,
    kind: str,
    units: int,
    unit_axis: int,
    input_axis: int,
    channel: int,
) -> Value:
    """A dense layer between the entries of an axis and units of its own.

    Args:
        walk: the walk.
        node: the layer's node.
        x: its input, zero where masked.
        weight: a parameter of two axes, or a part of one.
        bias: a parameter or None.
        kind: for people.
        units: how many.
        unit_axis: of the weight.
        input_axis: of the weight.
        channel: axis of the input that is read, and of the result.
    """
    x = walk.value(x)
    axis = channel % x.ids.dim()
    inputs = walk.book.sets.over(x.ids, [dim for dim in range(x.ids.dim()) if dim != axis])
    layer = walk.book.layer(_layer_name(walk, weight), kind, units)
    walk.used(weight, layer.sets.unsqueeze(1 - unit_axis), inputs.unsqueeze(1 - input_axis))
    return _outputs(walk, node, x, layer.sets, bias, axis=axis)


def _outputs(walk: Walk, node: fx.Node, x: Value, sets: Tensor, bias: Any, axis: int) -> Value:
    if isinstance(bias, ParameterValue):
        walk.used(bias, sets)
    elif bias is not None:
        raise Refused("its bias is computed", "use a parameter of the layer")
    result = walk.run_on_meta(node)
    shape = [1] * result.dim()
    shape[axis] = len(sets)
    return Value(compact(sets.reshape(shape)).expand(result.shape), result.dtype, Masked.DIRTY)


def _parameters(walk: Walk, node: fx.Node) -> tuple[ParameterValue, ParameterValue | None]:
    name = str(node.target)
    if f"{name}.weight" not in walk.parameters:
        raise Refused(
            "its weight is computed from other parameters (a parametrisation)",
            "bake it in: torch.nn.utils.parametrize.remove_parametrizations, or fix(model)",
        )
    bias = walk.whole(f"{name}.bias") if f"{name}.bias" in walk.parameters else None
    return walk.whole(f"{name}.weight"), bias


def _layer_name(walk: Walk, weight: ParameterValue) -> str:
    """The layer's name: its module's; a part of a parameter is a layer of its own."""
    name = weight.name.removesuffix(".weight")
    whole = walk.parameters[weight.name].numel()
    if weight.index.numel() == whole:
        return name
    row = int(weight.index.min()) // (whole // walk.parameters[weight.name].shape[0])
    return f"{weight.name}[{row}:{row + weight.index.shape[0]}]"
