"""A task's norms, without masks: over the units that are kept, whose statistics are those of the open units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.models.extraction.layout import Live, as_they_lie, live, nonzero
from avalanche_amnesia.models.extraction.reading import readers
from avalanche_amnesia.models.extraction.shrinking import Shrinking, shrinks
from avalanche_amnesia.models.extraction.weighted import filled, folded
from avalanche_amnesia.models.task_owned import TaskBatchNorm, TaskGroupNorm, TaskLayerNorm, TaskNorm

_BATCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_INSTANCE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


def _open(mask: Tensor | None, units: int) -> Tensor:
    return torch.ones(units) if mask is None else mask.cpu().reshape(-1).expand(units).contiguous()


def _affine(module: TaskNorm, mask: Tensor, index: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of the units that are kept, mask included; None where they are ones, or zeros."""
    weight: Tensor | None = module.weight
    bias, here = module.bias, mask[index]
    if weight is None and not bool((here == 1).all()):
        weight = torch.ones(len(mask))
    like = next(module.parameters(), here)
    return tuple(  # type: ignore[return-value]
        None if part is None else part[index] * here.to(like) for part in (weight, bias)
    )


@shrinks(TaskBatchNorm)
def by_channel(walk: Shrinking, node: fx.Node, x: Live, mask: Tensor | None = None) -> Live:
    """Batch and instance norm: may be folded into the layer in front of it where nobody else reads that."""
    module: Any = walk.module(node)
    units = x.shape[1]
    open_ = _open(mask, units)
    kept = as_they_lie(nonzero(open_), x.kept(1))
    x = walk.bring(x, kept, 1)
    weight, bias = _affine(module, open_, kept)
    mean, var = (None if s is None else s[kept] for s in (module.running_mean, module.running_var))
    folds = walk.fold and not module.instance and _sole_reader(walk, node)
    if folds and mean is not None and var is not None:
        scale = (var.double() + module.eps).rsqrt()
        scale = scale if weight is None else scale * weight.double()
        shift = -mean.double() * scale + (0.0 if bias is None else bias.double())
        one = _fold(walk, x, scale, shift, kept)
        if one is not None:
            return live(one, x.full, 1, kept)
    kind: Any = (_INSTANCE if module.instance else _BATCH)[x.dim]
    affine = weight is not None or bias is not None
    made = kind(len(kept), eps=module.eps, affine=affine, track_running_stats=mean is not None, device="meta")
    if affine:
        weight = torch.ones(len(kept)) if weight is None else weight
        filled(made, weight=weight, bias=torch.zeros_like(weight) if bias is None else bias)
    if mean is not None:
        filled(made, running_mean=mean, running_var=var, num_batches_tracked=torch.zeros((), dtype=torch.long))
    walk.norms[str(node.target)] = made, kept
    here = walk.new.call_module(walk.parts.put_module(str(node.target), made, (node,)), (x.node,))
    return live(here, x.full, 1, kept)


def _sole_reader(walk: Shrinking, node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and readers(source) == [node]


def _fold(walk: Shrinking, x: Live, scale: Tensor, shift: Tensor, kept: Tensor) -> fx.Node | None:
    if x.node.op != "call_module" or (x.dim != 2 and isinstance(_made(walk, x.node), nn.Linear)):
        return None
    one = folded(_made(walk, x.node), scale, shift, kept)
    if one is None:
        return None
    name = walk.parts.put_module(str(x.node.target), one, (x.node, "folded"))
    return walk.new.call_module(name, x.node.args)


def _made(walk: Shrinking, node: fx.Node) -> nn.Module:
    return walk.parts.root.get_submodule(str(node.target))


@shrinks(TaskLayerNorm)
def layer_norm(walk: Shrinking, node: fx.Node, x: Live, mask: Tensor | None = None) -> Live:
    """Layer and RMS norm."""
    module: Any = walk.module(node)
    open_ = torch.ones(module.shape) if mask is None else mask.cpu().expand(module.shape).contiguous()
    if len(module.shape) > 1 and not bool((open_ == 1).all()):
        return _written_out(walk, node, x, module, open_)
    if len(module.shape) > 1:
        kept, shape = torch.arange(x.shape[-1]), module.shape
    else:
        kept = as_they_lie(nonzero(open_), x.kept(-1))
        shape = (len(kept),)
    x = walk.bring(x, kept, -1)
    if len(module.shape) > 1:
        weight, bias = module.weight, module.bias
    else:
        weight, bias = _affine(module, open_, kept)
    affine = weight is not None or bias is not None
    if module.centred:
        made: Any = nn.LayerNorm(shape, eps=module.eps, elementwise_affine=affine, bias=bias is not None, device="meta")
    else:
        made = nn.RMSNorm(shape, eps=module.eps, elementwise_affine=affine, device="meta")
    if affine:
        filled(made, weight=torch.ones(shape) if weight is None else weight, bias=bias)
    here = walk.new.call_module(walk.parts.put_module(str(node.target), made, (node,)), (x.node,))
    return live(here, x.full, x.dim - 1, kept)


@shrinks(TaskGroupNorm)
def group_norm(walk: Shrinking, node: fx.Node, x: Live, mask: Tensor | None = None) -> Live:
    """Group norm: groups that lost the same number of channels stay a group norm."""
    module: Any = walk.module(node)
    open_ = _open(mask, x.shape[1])
    counts = (open_ != 0).reshape(module.groups, -1).sum(1)
    kept = nonzero(open_)
    sizes = counts[counts > 0].unique()
    if len(sizes) != 1:
        of_channel = open_.reshape(module.groups, -1)
        return _written_out(walk, node, x, module, of_channel, groups=module.groups)
    x = walk.bring(x, kept, 1)
    weight, bias = _affine(module, open_, kept)
    groups = int((counts > 0).sum())
    made = nn.GroupNorm(groups, len(kept), eps=module.eps, affine=weight is not None or bias is not None, device="meta")
    if weight is not None:
        filled(made, weight=weight, bias=torch.zeros_like(weight) if bias is None else bias)
    here = walk.new.call_module(walk.parts.put_module(str(node.target), made, (node,)), (x.node,))
    return live(here, x.full, 1, kept)


def _written_out(
    walk: Shrinking, node: fx.Node, x: Live, module: Any, open_: Tensor, groups: int | None = None
) -> Live:
    """The norm over the open units of the whole value, in plain operations; images may be of any size."""
    walk.note_whole(type(module).__name__)
    call, method, put = walk.new.call_function, walk.new.call_method, walk.parts.put_tensor
    whole, like = walk.whole(x), x.dtype
    values = whole if groups is None else method("unflatten", (whole, 1, (groups, -1)))
    dims = list(range(-open_.dim(), 0)) if groups is None else [2]
    positions = [] if groups is None else list(range(3, x.dim + 1))
    share = open_ / open_.sum([dim for dim in range(open_.dim()) if groups is None or dim], keepdim=True).clamp_min(
        1e-6
    )
    weights = put(share.reshape(*share.shape, *(1 for _ in positions)).to(like))

    def mean(of: fx.Node) -> fx.Node:
        of = method("mean", (of, positions, True)) if positions else of
        return method("sum", (call(torch.mul, (of, weights)), dims, True))

    if getattr(module, "centred", True):
        values = call(torch.sub, (values, mean(values)))
    variance = mean(call(torch.square, (values,)))
    values = call(torch.mul, (values, call(torch.rsqrt, (call(torch.add, (variance, module.eps)),))))
    values = values if groups is None else method("reshape_as", (values, whole))
    shape = open_.shape if groups is None else (-1, *(1,) * (x.dim - 2))
    scale = open_.reshape(-1) if module.weight is None else open_.reshape(-1) * module.weight.reshape(-1)
    values = call(torch.mul, (values, put(scale.reshape(shape).to(like))))
    if module.bias is not None:
        values = call(torch.add, (values, put((open_.reshape(-1) * module.bias.reshape(-1)).reshape(shape).to(like))))
    return Live(values, x.full)
