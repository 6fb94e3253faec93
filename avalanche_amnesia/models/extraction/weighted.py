"""Layers with weights keep the rows of open units and the columns of live inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.models.extraction.layout import Live, live, nonzero
from avalanche_amnesia.models.extraction.reading import entries_read
from avalanche_amnesia.models.extraction.shrinking import Shrinking, shrinks
from avalanche_amnesia.models.rules import mixing, weighted

_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
_TRANSPOSED = {3: nn.ConvTranspose1d, 4: nn.ConvTranspose2d, 5: nn.ConvTranspose3d}


def filled(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """A module that was made without memory, with its parameters and buffers."""
    for name, value in tensors.items():
        if value is None:
            continue
        kept = value.detach().clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(kept) if name in module._parameters else kept)
    return module


def _name(walk: Shrinking, node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    weight = next((a for a in node.all_input_nodes if a.op == "get_attr"), None)
    return node.name if weight is None else str(weight.target).removesuffix(".weight")


def rows_of(walk: Shrinking, node: fx.Node, units: int, axis: int) -> tuple[Tensor, bool]:
    """The units that are kept of a layer, and whether whatever the others hold is masked before it is read."""
    wanted = entries_read(walk, node, axis)
    return (torch.arange(units), False) if wanted is None else (nonzero(wanted), True)


@shrinks(weighted.linear)
def linear(walk: Shrinking, node: fx.Node, x: Live) -> Any:
    """``nn.Linear``."""
    module: Any = walk.module(node)
    return _linear(walk, node, x, module.weight, module.bias)


@shrinks(weighted.functional_linear)
def functional_linear(walk: Shrinking, node: fx.Node, input: Any, weight: Any, bias: Any = None) -> Any:
    """``F.linear`` with constant weights."""
    if not isinstance(input, Live) or not isinstance(weight, Tensor) or isinstance(bias, Live):
        return NotImplemented
    return _linear(walk, node, input, weight, bias)


@shrinks(mixing.product)
def product(walk: Shrinking, node: fx.Node, a: Any, b: Any) -> Any:
    """A product with a constant matrix is a layer."""
    if not isinstance(a, Live) or not isinstance(b, Tensor) or b.dim() != 2:
        return NotImplemented
    return _linear(walk, node, a, b.T, None)


def _linear(walk: Shrinking, node: fx.Node, x: Live, weight: Tensor, bias: Tensor | None) -> Live:
    if not x.along(-1):
        x = Live(walk.whole(x), x.full)
    columns = x.kept(-1)
    rows, masked = rows_of(walk, node, len(weight), -1)
    made = filled(
        nn.Linear(len(columns), len(rows), bias=bias is not None, device="meta"),
        weight=weight[rows][:, columns],
        bias=None if bias is None else bias[rows],
    )
    key = (nn.Linear, weight, tuple(columns.tolist()), tuple(rows.tolist()))
    here = walk.new.call_module(walk.parts.put_module(_name(walk, node), made, key), (x.node,))
    full = walk.on_meta(node, *walk.arguments(node)[0], **walk.arguments(node)[1])
    return live(here, full, full[0].dim() - 1, rows, None if masked else 0.0)


@shrinks(weighted.embedding)
def embedding(walk: Shrinking, node: fx.Node, x: Live) -> Any:
    """``nn.Embedding``: its columns are units."""
    return _embedding(walk, node, x, walk.module(node).weight)  # type: ignore[arg-type]


@shrinks(weighted.functional_embedding)
def functional_embedding(walk: Shrinking, node: fx.Node, input: Any, weight: Any, *rest: Any, **options: Any) -> Any:
    """``F.embedding`` with constant weights."""
    if not isinstance(input, Live) or not isinstance(weight, Tensor):
        return NotImplemented
    return _embedding(walk, node, input, weight)


def _embedding(walk: Shrinking, node: fx.Node, x: Live, weight: Tensor) -> Live:
    columns, masked = rows_of(walk, node, weight.shape[1], -1)
    made = filled(nn.Embedding(len(weight), len(columns), device="meta"), weight=weight[:, columns])
    key = (nn.Embedding, weight, tuple(columns.tolist()))
    here = walk.new.call_module(walk.parts.put_module(_name(walk, node), made, key), (walk.whole(x),))
    full = walk.on_meta(node, *walk.arguments(node)[0], **walk.arguments(node)[1])
    return live(here, full, full[0].dim() - 1, columns, None if masked else 0.0)


@dataclass(frozen=True)
class _Convolution:
    """A convolution of the full network."""

    weight: Tensor
    bias: Tensor | None
    options: dict[str, Any]
    groups: int

    @staticmethod
    def of(module: Any) -> _Convolution:
        options = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        return _Convolution(module.weight, module.bias, options, module.groups)


@shrinks(weighted.convolution)
def convolution(walk: Shrinking, node: fx.Node, x: Live) -> Any:
    """``nn.Conv*d``."""
    return _convolve(walk, node, x, _Convolution.of(walk.module(node)))


@shrinks(weighted.functional_convolution)
def functional_convolution(
    walk: Shrinking,
    node: fx.Node,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """``F.conv*d`` with constant weights."""
    if not isinstance(input, Live) or not isinstance(weight, Tensor) or isinstance(bias, Live):
        return NotImplemented
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return _convolve(walk, node, input, _Convolution(weight, bias, options, groups))


def _convolve(walk: Shrinking, node: fx.Node, x: Live, conv: _Convolution) -> Any:
    if x.dim != conv.weight.dim():
        return NotImplemented  # a single sample
    if not x.along(1):
        x = Live(walk.whole(x), x.full)
    units, groups = len(conv.weight), conv.groups
    rows, masked = rows_of(walk, node, units, 1)
    if not masked and conv.bias is None:
        rows = nonzero(_reached(x.kept(1), units, groups, conv.weight.shape[1]))
    if groups > 1:
        inputs, rows, groups = _regular(x.kept(1), rows, groups, conv.weight.shape[1], units // groups)
        x = walk.bring(x, inputs, 1)
    columns = x.kept(1)
    per_group = len(columns) // groups
    group_of_row = rows // (units // conv.groups)
    number = torch.searchsorted(group_of_row.unique(), group_of_row)
    taken = columns.reshape(groups, per_group)[number] % conv.weight.shape[1]
    weight = torch.stack([conv.weight[row][cut] for row, cut in zip(rows.tolist(), taken, strict=True)])
    made = filled(
        _CONVOLUTIONS[weight.dim()](
            *(len(columns), len(rows), tuple(weight.shape[2:])),  # type: ignore[arg-type]
            **conv.options,
            groups=groups,
            bias=conv.bias is not None,
            device="meta",
        ),
        weight=weight,
        bias=None if conv.bias is None else conv.bias[rows],
    )
    key = ("conv", conv.weight, tuple(columns.tolist()), tuple(rows.tolist()), str(conv.options))
    here = walk.new.call_module(walk.parts.put_module(_name(walk, node), made, key), (x.node,))
    full = walk.on_meta(node, *walk.arguments(node)[0], **walk.arguments(node)[1])
    return live(here, full, 1, rows, None if masked else 0.0)


def _reached(inputs: Tensor, units: int, groups: int, per_group: int) -> Tensor:
    """Which units have an input, ``(units,)``: without a bias the others are zero."""
    groups_with = torch.zeros(groups, dtype=torch.bool)
    groups_with[inputs // per_group] = True
    return groups_with.repeat_interleave(units // groups)


def _regular(inputs: Tensor, rows: Tensor, groups: int, inputs_each: int, rows_each: int) -> tuple[Tensor, Tensor, int]:
    """Inputs and units of a grouped convolution, so many more that all groups are of one size again."""
    kept = (rows // rows_each).unique()
    return _evened(inputs, kept, groups, inputs_each), _evened(rows, kept, groups, rows_each), len(kept)


def _evened(index: Tensor, kept: Tensor, groups: int, each: int) -> Tensor:
    """The entries of the groups that are kept, and as many more that every group has the same number."""
    held = torch.zeros(groups, each)
    held.view(-1)[index] = 1.0
    held = held[kept]
    most = max(1, int(held.sum(1).max()))
    chosen = held.argsort(dim=1, descending=True, stable=True)[:, :most].sort(1).values
    return (chosen + kept[:, None] * each).reshape(-1)


@shrinks(weighted.transposed)
def transposed(walk: Shrinking, node: fx.Node, x: Live, output_size: Any = None) -> Any:
    """``nn.ConvTranspose*d``: its weight lies ``(inputs, units, …)``."""
    module: Any = walk.module(node)
    if module.groups > 1 or output_size is not None or x.dim != module.weight.dim():
        return NotImplemented
    if not x.along(1):
        x = Live(walk.whole(x), x.full)
    columns = x.kept(1)
    rows, masked = rows_of(walk, node, module.weight.shape[1], 1)
    names = ("stride", "padding", "output_padding", "dilation")
    made = filled(
        _TRANSPOSED[x.dim](
            *(len(columns), len(rows), module.kernel_size),
            **{name: getattr(module, name) for name in names},
            bias=module.bias is not None,
            device="meta",
        ),
        weight=module.weight[columns][:, rows],
        bias=None if module.bias is None else module.bias[rows],
    )
    key = ("transposed", module.weight, tuple(columns.tolist()), tuple(rows.tolist()))
    here = walk.new.call_module(walk.parts.put_module(str(node.target), made, key), (x.node,))
    return live(here, walk.on_meta(node, x), 1, rows, None if masked else 0.0)


def folded(module: nn.Module, scale: Tensor, shift: Tensor, rows: Tensor) -> nn.Module | None:
    """A layer followed by ``scale · y + shift`` per unit, as one layer with some of its rows; None where it can't be.

    Worked out in float64, so that nothing but the result is rounded.
    """
    if not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or len(rows) < len(module.weight):
        return None
    by_row = scale.double().reshape(-1, *(1,) * (module.weight.dim() - 1))
    weight = (module.weight.double() * by_row).to(module.weight.dtype)
    bias = shift.double() if module.bias is None else module.bias.double() * scale.double() + shift.double()
    made: Any
    if isinstance(module, nn.Linear):
        made = nn.Linear(module.in_features, module.out_features, device="meta")
    else:
        options = {n: getattr(module, n) for n in ("stride", "padding", "dilation", "groups", "padding_mode")}
        kind: Any = type(module)
        made = kind(module.in_channels, module.out_channels, module.kernel_size, **options, device="meta")
    return filled(made, weight=weight, bias=bias.to(module.weight.dtype))
