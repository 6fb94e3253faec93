"""Normalisation: a copy per task, with the task's mask folded into it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from avalanche_amnesia.models.findings import Refused
from avalanche_amnesia.models.masking import call_owned
from avalanche_amnesia.models.registry import rule
from avalanche_amnesia.models.task_owned import NormKind, OwnedSpec
from avalanche_amnesia.models.units import compact
from avalanche_amnesia.models.values import Masked, ParameterValue, Value, filled
from avalanche_amnesia.models.walk import Walk

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@rule(*_BATCH, *_INSTANCE, by_channel=True)
def by_channel(walk: Walk, node: fx.Node, x: Value) -> Value:
    """Batch and instance norm."""
    module: Any = walk.module(node)
    kind: NormKind = "instance" if isinstance(module, _INSTANCE) else "batch"
    statistics = ("running_mean", "running_var") if module.running_mean is not None else ()
    names = _names(walk, node)
    spec = OwnedSpec(
        str(node.target),
        names,
        kind,
        eps=module.eps,
        momentum=module.momentum,
        statistics=tuple(f"{node.target}.{name}" for name in statistics),
    )
    return _own(walk, node, x, spec)


@rule(F.batch_norm, by_channel=True)
def functional_batch_norm(
    walk: Walk,
    node: fx.Node,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    """``F.batch_norm`` with parameters and buffers of the backbone."""
    statistics = tuple(
        str(argument.target)
        for place, name in ((1, "running_mean"), (2, "running_var"))
        for argument in [node.args[place] if len(node.args) > place else node.kwargs.get(name)]
        if isinstance(argument, fx.Node)
    )
    names = (_name(walk, weight), _name(walk, bias))
    where = next((name for name in (*names, *statistics) if name is not None), node.name).rpartition(".")[0]
    return _own(
        walk,
        node,
        input,
        OwnedSpec(where or node.name, names, "batch", eps=eps, momentum=momentum, statistics=statistics),
    )


@rule(nn.LayerNorm, nn.RMSNorm, zeros=True)
def layer_norm(walk: Walk, node: fx.Node, x: Value) -> Value:
    """Layer and RMS norm."""
    module: Any = walk.module(node)
    kind: NormKind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    shape = tuple(module.normalized_shape)
    return _own(walk, node, x, OwnedSpec(str(node.target), _names(walk, node), kind, eps=eps, shape=shape))


@rule(F.layer_norm, torch.layer_norm, zeros=True)
def functional_layer_norm(
    walk: Walk,
    node: fx.Node,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Value:
    """``F.layer_norm`` with parameters of the backbone."""
    names = (_name(walk, weight), _name(walk, bias))
    spec = OwnedSpec(_prefix(names, node), names, "layer", eps=eps, shape=tuple(normalized_shape))
    return _own(walk, node, input, spec)


@rule(F.rms_norm, torch.rms_norm, zeros=True)
def functional_rms_norm(
    walk: Walk, node: fx.Node, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Value:
    """``F.rms_norm`` with a parameter of the backbone."""
    names = (_name(walk, weight), None)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    spec = OwnedSpec(_prefix(names, node), names, "rms", eps=eps, shape=tuple(normalized_shape))
    return _own(walk, node, input, spec)


@rule(nn.GroupNorm, zeros=True)
def group_norm(walk: Walk, node: fx.Node, x: Value) -> Value:
    """Group norm."""
    module: Any = walk.module(node)
    spec = OwnedSpec(str(node.target), _names(walk, node), "group", eps=module.eps, groups=module.num_groups)
    return _own(walk, node, x, spec)


@rule(F.group_norm, torch.group_norm, zeros=True)
def functional_group_norm(
    walk: Walk, node: fx.Node, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Value:
    """``F.group_norm`` with parameters of the backbone."""
    names = (_name(walk, weight), _name(walk, bias))
    return _own(walk, node, input, OwnedSpec(_prefix(names, node), names, "group", eps=eps, groups=num_groups))


@rule(nn.LocalResponseNorm, nn.CrossMapLRN2d, F.local_response_norm)
def across_channels(walk: Walk, node: fx.Node, x: Value, *args: Any, **options: Any) -> Value:
    """Divided by a number above zero: zero stays zero."""
    return x


def _own(walk: Walk, node: fx.Node, x: Any, spec: OwnedSpec) -> Value:
    """Put the task's own copy in the node's place."""
    if not isinstance(x, Value):
        raise Refused("a parameter is normalised", "use it as it is")
    if any(walk.is_frozen(name) for name in (spec.name, *spec.parameters) if name is not None):
        raise Refused(
            "a norm can't be frozen in part", "declare all of it frozen=[…], or nothing: every task has its own"
        )
    if spec.kind in ("layer", "rms"):
        dims = range(x.ids.dim() - len(spec.shape))
    else:
        dims = [dim for dim in range(x.ids.dim()) if dim != 1]  # type: ignore[assignment]
    sets = filled(walk.book.sets.over(x.ids, dims))  # a norm's statistics and shifts reach padding too
    if walk.norm == "batch":
        spec = spec.affine_free()
    mask = walk.masks.emit(sets)
    kept = walk.book.owned.setdefault(spec.name, spec.masked_by(None if mask is None else compact(sets)))
    if (kept.kind, kept.groups, kept.shape) != (spec.kind, spec.groups, spec.shape):
        raise Refused(f"norm {spec.name!r} is used in two unlike ways", "use two norms")
    with walk.graph.inserting_after(node):
        own = walk.graph.call_function(
            call_owned, (walk.tasks_own, spec.name, node.args[0] if node.args else node.kwargs["input"], mask)
        )
    node.replace_all_uses_with(own)
    by_position = spec.kind in ("layer", "rms")
    shape = sets.shape if by_position else (1, len(sets), *(1,) * (x.ids.dim() - 2))
    result = x.like(sets.reshape(shape).expand(x.ids.shape), Masked.ZERO)
    walk.values[own] = result
    return result


def _names(walk: Walk, node: fx.Node) -> tuple[str | None, str | None]:
    weight, bias = (f"{node.target}.{kind}" for kind in ("weight", "bias"))
    return weight if weight in walk.parameters else None, bias if bias in walk.parameters else None


def _name(walk: Walk, parameter: Any) -> str | None:
    if parameter is None or (isinstance(parameter, Tensor) and not isinstance(parameter, ParameterValue)):
        return None
    if not isinstance(parameter, ParameterValue) or parameter.index.numel() != walk.parameters[parameter.name].numel():
        raise Refused("a norm's weight or bias is computed", "use parameters of the norm itself")
    return parameter.name


def _prefix(names: tuple[str | None, ...], node: fx.Node) -> str:
    known = next((name for name in names if name is not None), "")
    return known.rpartition(".")[0] or known or node.name
