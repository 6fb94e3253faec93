"""Rules for layers with weights and for modules: rows of open units and columns of live inputs are kept."""

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.contrib.export.shrinking import (
    Live,
    Shrinking,
    as_they_lie,
    filled,
    live,
    nonzero,
    one_axis,
    shrinks,
    taken_along,
)
from avalanche_amnesia.unit_graph.masking import call_owned, tensor_in
from avalanche_amnesia.unit_graph.task_owned import TaskBatchNorm, TaskGroupNorm, TaskLayerNorm, TaskNorm
from avalanche_amnesia.unit_graph.values import Masked, leaves, map_leaves

A: Any = torch.ops.aten
_CONVOLUTIONS: dict[Any, Any] = {
    A.conv1d: nn.Conv1d,
    A.conv2d: nn.Conv2d,
    A.conv3d: nn.Conv3d,
    A.conv_transpose1d: nn.ConvTranspose1d,
    A.conv_transpose2d: nn.ConvTranspose2d,
    A.conv_transpose3d: nn.ConvTranspose3d,
}
_BATCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_INSTANCE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


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


@dataclass(frozen=True)
class Returned:
    """Result of a declared module: its node, and the place of each tensor in it; None where that is not known."""

    node: fx.Node
    places: list[tuple[Any, ...]] | None


def run_whole(walk: Shrinking, node: fx.Node, name: str, module: nn.Module, args: Any, kwargs: Any) -> Returned:
    """The call of a module on whole values."""
    if any(isinstance(leaf, Live) and leaf.axis is not None for leaf in leaves((args, kwargs))):
        walk.note_whole(type(module).__name__)
    whole = map_leaves((args, kwargs), lambda x: walk.whole(x) if isinstance(x, Live) else x)
    skipped = len(node.args) - len(args)
    given = fx.node.map_arg((node.args[skipped:], node.kwargs), walk.zeros)
    with torch.no_grad():
        places = _places(taken_along(module)(*given[0], **given[1]))
    called = walk.parts.put_module(name, ("declared", name), taken_along(module))
    return Returned(walk.new.call_module(called, *map_leaves(whole, walk.as_node)), places)


def _places(result: Any) -> list[tuple[Any, ...]] | None:
    if isinstance(result, Tensor):
        return [()]
    if type(result) not in (tuple, list, dict):
        return [] if not hasattr(result, "__dict__") and not isinstance(result, (tuple, list, Mapping)) else None
    found: list[tuple[Any, ...]] = []
    for key, part in result.items() if isinstance(result, dict) else enumerate(result):
        inner = _places(part)
        if inner is None:
            return None
        found += [(key, *place) for place in inner]
    return found


@shrinks("call_module")
def frozen(walk: Shrinking, node: fx.Node, *args: Any, **kwargs: Any) -> Returned:
    """A module that only the first task trained."""
    return run_whole(walk, node, str(node.target), walk.backbone.get_submodule(str(node.target)), args, kwargs)


@shrinks(tensor_in)
def one_of_several(walk: Shrinking, node: fx.Node, result: Returned, number: int) -> Live:
    """One of the tensors that a module returned."""
    here = result.node
    if result.places is None:  # a type of the user's own, which only this package's function can take apart
        here = walk.new.call_function(tensor_in, (here, number))
    else:
        for key in result.places[number]:
            here = walk.new.call_function(operator.getitem, (here, key))
    return Live(here, walk.values[node].shape)


@shrinks(call_owned)
def own(walk: Shrinking, node: fx.Node, modules: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """A module of the task's own: a norm, or a declared module as it is."""
    module = modules[name]
    rule = {TaskBatchNorm: _by_channel, TaskLayerNorm: _over_last, TaskGroupNorm: _by_group}.get(type(module))
    if rule is None:
        return run_whole(walk, node, name, module, args, kwargs)
    return rule(walk, node, name, module, *args)


def _affine(module: TaskNorm, open_: Tensor, at: Any = slice(None)) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias, mask included, of the units that are kept; None where they are ones, or zeros."""
    open_ = open_[at]
    if module.weight is None and module.bias is None and bool((open_ == 1).all()):
        return None, None
    weight = open_ if module.weight is None else module.weight.detach().cpu()[at] * open_
    return weight, None if module.bias is None else module.bias.detach().cpu()[at] * open_


def _with_affine(made: nn.Module, weight: Tensor | None, bias: Tensor | None) -> nn.Module:
    """A norm of torch with weight and bias, which it has both or neither."""
    return (
        made if weight is None else filled(made, weight=weight, bias=torch.zeros_like(weight) if bias is None else bias)
    )


def _open_channels(walk: Shrinking, x: Live, mask: Tensor | None) -> Tensor:
    return torch.ones(x.shape[1], dtype=walk.dtype) if mask is None else mask.reshape(-1).expand(x.shape[1])


def _by_channel(walk: Shrinking, node: fx.Node, name: str, module: Any, x: Live, mask: Tensor | None) -> Live:
    """Batch and instance norm: folded into the layer in front of it, where nothing else reads that layer."""
    open_ = _open_channels(walk, x, mask)
    statistics = [s if s is None else s.cpu() for s in (module.running_mean, module.running_var)]
    source = node.args[2]
    assert isinstance(source, fx.Node)
    readers = [user for user in source.users if user.target is not A.sym_size.int]
    kept = x.kept(1)
    layer = walk.parts.module(x.node) if readers == [node] and not module.instance else None
    if statistics[0] is not None and (len(x.shape) != 2) != isinstance(layer, nn.Linear):
        mean, var = (s[kept].double() for s in statistics)  # type: ignore[index]
        weight, bias = _affine(module, open_, kept)
        scale = (var + module.eps).rsqrt() * (1.0 if weight is None else weight.double())
        one = folded(layer, scale, (0.0 if bias is None else bias.double()) - mean * scale)
        if one is not None:
            return live(walk.layer(str(x.node.target), (x.node, "folded"), x.node.args[0], one), x.shape, 1, kept)  # type: ignore[arg-type]
    kept = as_they_lie(nonzero(open_), [kept], len(open_))
    x = walk.bring(x, 1, kept)
    weight, bias = _affine(module, open_, kept)
    kind: Any = (_INSTANCE if module.instance else _BATCH)[len(x.shape)]
    tracked = statistics[0] is not None
    made = kind(len(kept), eps=module.eps, affine=weight is not None, track_running_stats=tracked, device="meta")
    _with_affine(made, weight, bias)
    if tracked:
        filled(made, running_mean=statistics[0][kept], running_var=statistics[1][kept])  # type: ignore[index]
        filled(made, num_batches_tracked=torch.zeros((), dtype=torch.long))
    return live(walk.layer(name, node, x.node, made), x.shape, 1, kept)


def _over_last(walk: Shrinking, node: fx.Node, name: str, module: Any, x: Live, mask: Tensor | None) -> Live:
    """Layer and RMS norm."""
    shape, first = list(module.shape), len(x.shape) - len(module.shape)
    open_ = torch.ones(shape, dtype=walk.dtype) if mask is None else mask.expand(module.shape)
    cut = one_axis(open_ != 0, torch.arange(open_.numel()).reshape(shape))
    if cut is None and not bool(open_.all()):
        walk.note_whole(type(module).__name__)
        share = (open_ / open_.sum()).expand(shape)
        dims = list(range(-len(shape), 0))
        return _written_out(walk, module, walk.whole(x), share, dims, _affine(module, open_), module.centred)
    at: tuple[Any, ...] = (slice(None),)
    kept = None
    x = walk.whole(x) if cut is None or x.axis != first + cut[0] else x
    if cut is not None:
        kept = as_they_lie(cut[1], [x.kept(first + cut[0])], shape[cut[0]])
        x = walk.bring(x, first + cut[0], kept)
        at = (*(slice(None),) * cut[0], kept)
        shape[cut[0]] = len(kept)
    weight, bias = _affine(module, open_, at)
    options = {"eps": module.eps, "elementwise_affine": weight is not None, "device": "meta"}
    made: nn.Module = (
        nn.LayerNorm(shape, bias=bias is not None, **options) if module.centred else nn.RMSNorm(shape, **options)
    )
    filled(made, weight=weight, bias=bias)
    return live(walk.layer(name, node, x.node, made), x.shape, None if cut is None else first + cut[0], kept)


def _by_group(walk: Shrinking, node: fx.Node, name: str, module: Any, x: Live, mask: Tensor | None) -> Live:
    """Group norm: groups that lost the same number of channels stay a group norm."""
    open_ = _open_channels(walk, x, mask)
    counts = open_.reshape(module.groups, -1).sum(1)
    held = nonzero(counts)
    kept = evened(nonzero(open_), held, module.groups, len(open_) // module.groups)
    x = walk.bring(x, 1, kept)
    affine = _affine(module, open_, kept)
    if len(counts[held].unique()) > 1:
        share = open_[kept].reshape(len(held), -1) / counts[held][:, None]
        return _written_out(walk, module, x, share, [2], affine, True, kept)
    made = nn.GroupNorm(len(held), len(kept), eps=module.eps, affine=affine[0] is not None, device="meta")
    _with_affine(made, *affine)
    return live(walk.layer(name, node, x.node, made), x.shape, 1, kept)


def _written_out(
    walk: Shrinking,
    module: Any,
    x: Live,
    share: Tensor,
    dims: list[int],
    affine: tuple[Tensor | None, Tensor | None],
    centred: bool,
    kept: Tensor | None = None,
) -> Live:
    """A norm in plain operations; images may be of any size."""
    call, method, put = walk.new.call_function, walk.new.call_method, walk.parts.put_tensor
    positions = [] if kept is None else list(range(3, len(x.shape) + 1))
    shares = put(share.reshape(*share.shape, *(1 for _ in positions)))
    values = x.node if kept is None else method("unflatten", (x.node, 1, (len(share), -1)))

    def mean(of: fx.Node) -> fx.Node:
        of = method("mean", (of, positions, True)) if positions else of
        return method("sum", (call(torch.mul, (of, shares)), dims, True))

    if centred:
        values = call(torch.sub, (values, mean(values)))
    variance = call(torch.add, (mean(call(torch.square, (values,))), module.eps))
    values = call(torch.mul, (values, call(torch.rsqrt, (variance,))))
    values = values if kept is None else method("reshape_as", (values, x.node))
    targets: tuple[Any, ...] = (torch.mul, torch.add)
    for target, part in zip(targets, affine, strict=True):
        if part is not None:
            part = part if kept is None else part.reshape(-1, *(1,) * (len(x.shape) - 2))
            values = call(target, (values, put(part)))
    return Live(values, x.shape) if kept is None else live(values, x.shape, 1, kept)
