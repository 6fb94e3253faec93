"""Rules for layers with weights: each output is a unit; a mask uses a weight if it uses its output and its input."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.exporting import module_of
from avalanche_amnesia.unit_graph.findings import Unsupported
from avalanche_amnesia.unit_graph.values import ALWAYS, Masked, ParameterValue, Value, always_in_use, compact
from avalanche_amnesia.unit_graph.walk import Walk, rule

A: Any = torch.ops.aten


@rule(A.linear, zeros=True)
def linear(walk: Walk, node: fx.Node, x: Any, weight: Any, bias: Any = None) -> Any:
    """Trace a linear layer ``x Wᵀ + b``; return its result with a maskable unit per output."""
    if not _can_change(weight):
        return _fixed_layer(walk, node, weight, bias)
    return connect(walk, node, x, weight, bias, unit_axis=0)


@rule(A.addmm, zeros=True)
def added_product(walk: Walk, node: fx.Node, bias: Any, x: Any, weight: Any, **options: Any) -> Any:
    """Trace ``b + x W``, a linear layer with a transposed weight; return its result with a maskable unit per output."""
    if not _can_change(weight) or not isinstance(bias, ParameterValue) or len(bias.shape) != 1 or options:
        return _fixed_layer(walk, node, weight, bias)
    return connect(walk, node, x, weight, bias, unit_axis=1)


def _can_change(weight: Any) -> bool:
    """Return True if later tasks can change the weight; the outputs of the layer then need masks."""
    return isinstance(weight, ParameterValue) and not weight.fixed


def _fixed_layer(walk: Walk, node: fx.Node, weight: Any, bias: Any) -> Any:
    """Return the result of a layer with a fixed weight, which gets no mask; a trained bias gets a copy per task."""
    if isinstance(weight, ParameterValue) and not weight.parts and (name := _plain_bias(bias)) is not None:
        walk.draft.loose.add(name)  # the network is traced again, with the bias owned by each task
        return always_in_use(walk.result(node))
    return walk.conservative(node)


def _plain_bias(bias: Any) -> str | None:
    """Return a bias's parameter name if it is one whole trained parameter (no slice or sum), else None."""
    parts = bias.parts if isinstance(bias, ParameterValue) and not bias.fixed else ()
    return parts[0].name if len(parts) == 1 and parts[0].is_identity else None


def connect(walk: Walk, node: fx.Node, x: Any, weight: ParameterValue, bias: Any, unit_axis: int) -> Value:
    """Trace a dense layer over the last axis of ``x``; return its result with a maskable unit per output."""
    x = walk.value(x)
    inputs = walk.draft.sets.union_along(x.ids, range(x.ids.dim() - 1))
    sets = _unit_sets(walk, node, weight, "Linear", weight.shape[unit_axis], rows=unit_axis == 0)
    walk.draft.record(weight, sets.unsqueeze(1 - unit_axis), inputs.unsqueeze(unit_axis))
    return _output_units(walk, node, sets, bias, axis=-1)


@rule(A.conv1d, A.conv2d, A.conv3d, zeros=True)
def convolution(walk: Walk, node: fx.Node, x: Any, weight: Any, bias: Any = None, *options: Any) -> Any:
    """Trace a convolution as a layer; return its result with a maskable unit per output channel (axis 1)."""
    if not _can_change(weight):
        return _fixed_layer(walk, node, weight, bias)
    x = walk.value(x)
    if x.ids.dim() != len(weight.shape):
        raise Unsupported("its input has no axis of samples", "give it one: x.unsqueeze(0)")
    units, per_group = weight.shape[:2]
    channels = x.ids.shape[1]
    groups = channels // per_group
    inputs = walk.draft.sets.union_along(x.ids, [dim for dim in range(x.ids.dim()) if dim != 1])
    ones = (1,) * (len(weight.shape) - 2)
    if groups == channels and groups > 1 and not bool((inputs == ALWAYS).any()):
        return _depthwise(walk, node, inputs, weight, bias, ones)
    sets = _unit_sets(walk, node, weight, f"Conv{len(ones)}d", units)
    by_group = inputs.reshape(groups, 1, per_group).expand(groups, units // groups, per_group)
    into = inputs.reshape(1, channels, *ones) if groups == 1 else by_group.reshape(units, per_group, *ones)
    walk.draft.record(weight, sets.reshape(units, 1, *ones), into)
    return _output_units(walk, node, sets, bias, axis=1)


def _depthwise(
    walk: Walk, node: fx.Node, inputs: Tensor, weight: ParameterValue, bias: Any, ones: Sequence[int]
) -> Value:
    """Trace a depthwise convolution: it adds no units; an output channel shares the unit of its input channel."""
    units = weight.shape[0]
    sets = inputs.repeat_interleave(units // len(inputs))
    walk.draft.record(weight, sets.reshape(units, 1, *ones))
    value = _output_units(walk, node, sets, bias, axis=1)
    return value if isinstance(bias, ParameterValue) else value.like(masked=Masked.ZERO)


@rule(A.conv_transpose1d, A.conv_transpose2d, A.conv_transpose3d, zeros=True)
def transposed_convolution(walk: Walk, node: fx.Node, x: Any, weight: Any, bias: Any = None, *options: Any) -> Any:
    """Trace a transposed convolution as a layer; return its result with a maskable unit per output channel."""
    if not _can_change(weight):
        return _fixed_layer(walk, node, weight, bias)
    x = walk.value(x)
    channels, per_group = weight.shape[:2]
    units = walk.result(node).shape[1]
    groups = units // per_group
    inputs = walk.draft.sets.union_along(x.ids, [dim for dim in range(x.ids.dim()) if dim != 1])
    ones = (1,) * (len(weight.shape) - 2)
    sets = _unit_sets(walk, node, weight, f"ConvTranspose{len(ones)}d", units)
    by_group = sets.reshape(groups, 1, per_group).expand(groups, channels // groups, per_group)
    walk.draft.record(weight, by_group.reshape(channels, per_group, *ones), inputs.reshape(channels, 1, *ones))
    return _output_units(walk, node, sets, bias, axis=1)


@rule(A.embedding)
def embedding(walk: Walk, node: fx.Node, weight: Any, x: Any, *rest: Any) -> Any:
    """Trace an embedding table as a layer; return its result with a maskable unit per dimension of the embedding."""
    if not _can_change(weight) or len(weight.shape) != 2:
        return walk.conservative(node)
    sets = _unit_sets(walk, node, weight, "Embedding", weight.shape[1])
    walk.draft.record(weight, sets.reshape(1, -1))
    return _output_units(walk, node, sets, None, axis=-1)


def _output_units(walk: Walk, node: fx.Node, sets: Tensor, bias: Any, axis: int) -> Value:
    if isinstance(bias, ParameterValue):
        walk.draft.record(bias, sets)
        walk.draft.biases |= {name for name in [_plain_bias(bias)] if name is not None}
    elif bias is not None:
        raise Unsupported("its bias is computed from the input", "add it after the layer")
    result = walk.result(node)
    shape = [1] * result.dim()
    shape[axis] = len(sets)
    masked = Masked.ZERO if bool((sets == ALWAYS).all()) else Masked.DIRTY  # without gates nothing needs a mask
    return Value(compact(sets.reshape(shape)).expand(result.shape), masked)


def _unit_sets(walk: Walk, node: fx.Node, weight: ParameterValue, kind: str, units: int, rows: bool = True) -> Tensor:
    """Return the id of the one-element set of each unit in a layer; create the units when the weight is first seen.

    A layer is named after its weight. Rows of one parameter are a separate layer, and so is each third of the
    queries, keys and values that attention takes from one parameter. A computed weight is named after its module.
    """
    part, module = weight.parts[0], module_of(node)
    if len(weight.parts) > 1 or part.group is not None:
        return walk.draft.get_or_add_layer(weight, (module, part.name.removesuffix(".weight")), kind, units).sets
    count = part.size.numel()
    first, used = 0, part.size[0]
    if not part.is_identity:
        first, used = int(part.index.min()) * part.size[0] // count, part.index.numel() * part.size[0] // count
    third = part.size[0] // 3
    if rows and part.name.endswith("in_proj_weight") and part.size[0] == 3 * third and not first % third:
        layers = []
        for row in range(0, used, third):
            name = f"{part.name}[{first + row}:{first + row + third}]"
            rows_of = weight.move_entries(partial(torch.narrow, dim=0, start=row, length=third))
            layers.append(walk.draft.get_or_add_layer(rows_of, (name,), kind, third))
        return torch.cat([layer.sets for layer in layers])
    name = part.name.removesuffix(".weight") if used == part.size[0] else f"{part.name}[{first}:{first + units}]"
    return walk.draft.get_or_add_layer(weight, (name, module), kind, units).sets
