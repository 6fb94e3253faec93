"""Rules for layers with weights: rows of open units and columns of live inputs are kept."""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.contrib.export.layout import Live, filled, live
from avalanche_amnesia.contrib.export.shrinking import Shrinking, shrinks
from avalanche_amnesia.unit_graph.values import Masked

A: Any = torch.ops.aten
_CONVOLUTIONS: dict[Any, Any] = {
    A.conv1d: nn.Conv1d,
    A.conv2d: nn.Conv2d,
    A.conv3d: nn.Conv3d,
    A.conv_transpose1d: nn.ConvTranspose1d,
    A.conv_transpose2d: nn.ConvTranspose2d,
    A.conv_transpose3d: nn.ConvTranspose3d,
}


def _name(node: fx.Node) -> str:
    weight = next((a for a in node.all_input_nodes if a.op == "get_attr"), None)
    return node.name if weight is None else str(weight.target).removesuffix(".weight").removesuffix(".bias")


def _result(walk: Shrinking, node: fx.Node, here: fx.Node, axis: int, rows: Tensor) -> Live:
    value = walk.values[node]
    return live(here, value.shape, axis, rows, None if value.masked is Masked.DIRTY else 0.0)


def _closed(walk: Shrinking, node: fx.Node, weight: Tensor, rows: Tensor, open_: Tensor) -> Tensor:
    """Weights, ``(rows, …)``; zero in rows that are there although their units are closed."""
    shut = ~torch.isin(rows, open_) | (not bool(walk.open(node).any()))
    return torch.where(shut.reshape(-1, *(1,) * (weight.dim() - 1)), 0.0, weight) if bool(shut.any()) else weight


@shrinks(A.linear)
def linear(walk: Shrinking, node: fx.Node, x: Any, weight: Any, bias: Any = None) -> Any:
    """``x Wᵀ + b``."""
    if not isinstance(x, Live) or not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(bias, Live):
        return NotImplemented
    rows = walk.kept(node, -1)
    x = walk.inputs(node, x, -1)
    weight = _closed(walk, node, weight, torch.arange(len(weight)), rows)
    return _result(walk, node, dense(walk, _name(node), x, weight, bias, rows), -1, rows)


def dense(walk: Shrinking, name: str, x: Live, weight: Tensor, bias: Tensor | None, rows: Tensor) -> fx.Node:
    """Some rows of a layer on the inputs that are kept."""
    columns = x.kept(-1)
    made = filled(
        nn.Linear(len(columns), len(rows), bias=bias is not None, device="meta"),
        weight=weight[rows][:, columns],
        bias=None if bias is None else bias[rows],
    )
    return walk.layer(name, (name, weight.data_ptr(), tuple(columns.tolist()), tuple(rows.tolist())), x.node, made)


@shrinks(A.addmm)
def added_product(walk: Shrinking, node: fx.Node, bias: Any, x: Any, weight: Any, **options: Any) -> Any:
    """``b + x W``."""
    if options or not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or bias.dim() != 1:
        return NotImplemented
    return linear(walk, node, x, weight.T, bias)


@shrinks(A.matmul, A.mm)
def product(walk: Shrinking, node: fx.Node, a: Any, b: Any) -> Any:
    """A product with a constant matrix is a layer."""
    return linear(walk, node, a, b.T) if isinstance(b, Tensor) and b.dim() == 2 else NotImplemented


@shrinks(A.embedding)
def embedding(walk: Shrinking, node: fx.Node, weight: Any, x: Any, *rest: Any) -> Any:
    """An embedding table: its columns are units."""
    if not isinstance(x, Live) or not isinstance(weight, Tensor):
        return NotImplemented
    columns = walk.kept(node, -1)
    weight = _closed(walk, node, weight.T, torch.arange(weight.shape[1]), columns).T
    made = filled(nn.Embedding(len(weight), len(columns), device="meta"), weight=weight[:, columns])
    key = ("embedding", weight.data_ptr(), tuple(columns.tolist()))
    return _result(walk, node, walk.layer(_name(node), key, walk.whole(x).node, made), -1, columns)


@shrinks(*_CONVOLUTIONS)
def convolution(
    walk: Shrinking, node: fx.Node, x: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any
) -> Any:
    """A convolution, transposed or not: units along axis 1."""
    if not isinstance(x, Live) or not isinstance(weight, Tensor) or isinstance(bias, Live):
        return NotImplemented
    if len(x.shape) != weight.dim():
        return NotImplemented  # a single sample
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    options |= dict(zip(names[3:], rest, strict=False))
    groups = options.pop("groups", 1)
    kind, transposed = _CONVOLUTIONS[target.overloadpacket], "transpose" in target.__name__
    by_unit = _other_way(weight, groups) if transposed else weight
    units_each, inputs_each = len(by_unit) // groups, by_unit.shape[1]
    open_ = rows = walk.kept(node, 1)
    x = walk.inputs(node, x, 1)
    count = groups
    if groups > 1:  # all groups of a layer are of one size: a group that keeps fewer gets closed ones too
        held = (rows // units_each).unique()
        x = walk.bring(x, 1, evened(x.kept(1), held, groups, inputs_each))
        rows, count = evened(rows, held, groups, units_each), len(held)
    columns = x.kept(1)
    group = torch.arange(len(rows)) // (len(rows) // count)
    taken = columns.reshape(count, -1)[group] % inputs_each
    cut = _closed(walk, node, by_unit[rows[:, None], taken], rows, open_)
    key = ("conv", weight.data_ptr(), tuple(columns.tolist()), tuple(rows.tolist()), str(options))
    options |= {"groups": count, "bias": bias is not None, "device": "meta"}
    made = filled(
        kind(len(columns), len(rows), tuple(weight.shape[2:]), **options),
        weight=_other_way(cut, count) if transposed else cut,
        bias=None if bias is None else _closed(walk, node, bias[rows], rows, open_),
    )
    return _result(walk, node, walk.layer(_name(node), key, x.node, made), 1, rows)


def _other_way(weight: Tensor, groups: int) -> Tensor:
    """A transposed convolution's weight ``(inputs, units/groups, …)`` as ``(units, inputs/groups, …)``, and back."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def evened(index: Tensor, kept: Tensor, groups: int, each: int) -> Tensor:
    """The entries of the groups that are kept, and as many more that every group has the same number."""
    held = torch.zeros(groups, each)
    held.view(-1)[index] = 1.0
    held = held[kept]
    most = max(1, int(held.sum(1).max()))
    chosen = held.argsort(dim=1, descending=True, stable=True)[:, :most].sort(1).values
    return (chosen + kept[:, None] * each).reshape(-1)


def folded(module: nn.Module | None, scale: Tensor, shift: Tensor) -> nn.Module | None:
    """A layer followed by ``scale · y + shift`` per unit, as one layer, worked out in float64; None: it can't be."""
    if not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return None
    by_row = scale.double().reshape(-1, *(1,) * (module.weight.dim() - 1))
    bias = shift.double() if module.bias is None else module.bias.double() * scale.double() + shift.double()
    made = copy.deepcopy(module)
    weight = (module.weight.double() * by_row).to(module.weight.dtype)
    return filled(made, weight=weight, bias=bias.to(module.weight.dtype))
