"""Task-owned modules: each task's copies of norms and of other parts that the user declares.

A norm shared by all tasks leaks between them: its parameters change, and its statistics mix the tasks' units.
Each task therefore has a copy, created and removed with its head (Duan, HAT-CL, 2023).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avalanche_amnesia.unit_graph.findings import ModelError

NormKind = Literal["batch", "instance", "layer", "rms", "group"]


class OwnParameter(nn.Module):
    """Module whose only parameter is a task's own copy of a backbone parameter."""

    def __init__(self, initial: Tensor) -> None:
        super().__init__()
        self.value = _copy_parameter(initial)


def _copy_parameter(initial: Tensor) -> nn.Parameter:
    """Return a new parameter with the same values and the same ``requires_grad``."""
    return nn.Parameter(initial.detach().clone(), initial.requires_grad)


class TaskNorm(nn.Module):
    """A normalisation layer of one task. The unit mask scales its weight and bias, so that masked units output +0.

    Norms that mix units (layer, rms, group) take their statistics only over the units in the mask:
    ``n = Σ_i a_i``, ``mean = Σ_i x_i / n``, ``var = Σ_i a_i·(x_i - mean)² / n``, if ``x`` is zero where ``a`` is.
    """

    def __init__(self, spec: OwnedSpec, known: Mapping[str, Tensor]) -> None:
        super().__init__()
        made = [None if name is None else _copy_parameter(known[name]) for name in spec.parameters]
        (self.weight, self.bias), self.spec = made, spec

    def _masked_affine(self, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        mask = mask.to(dtype if self.weight is None else self.weight.dtype)  # float32 would change the result
        weight = mask if self.weight is None else self.weight * mask
        # Always add a shift of +0: multiplication by the weight would keep a value's sign.
        return weight, torch.zeros_like(weight) if self.bias is None else (self.bias * mask).add_(0.0)

    @torch.no_grad()
    def reset_unused(self, template: TaskNorm, use: Tensor) -> None:
        """Reset entries of units outside the mask ``use`` to ``template``, so that they keep no trace of training."""
        mine, theirs = ((*norm.parameters(), *norm.buffers()) for norm in (self, template))
        for value, initial in zip(mine, theirs, strict=True):
            if value.dim():
                value.copy_(torch.where(use.to(value.device) > 0, value, initial))


class TaskBatchNorm(TaskNorm):
    """Batch or instance normalisation of one task: each channel is normalised separately."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, spec: OwnedSpec, known: Mapping[str, Tensor]) -> None:
        super().__init__(spec, known)
        mean, var = [known[name].detach().clone() for name in spec.statistics] or (None, None)
        count = None if mean is None else torch.zeros((), dtype=torch.long, device=mean.device)
        for name, value in (("running_mean", mean), ("running_var", var), ("num_batches_tracked", count)):
            self.register_buffer(name, value)
        self.momentum = spec.momentum

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Normalise ``x``, ``(batch, channels, …)``; ``mask``: ``(channels,)``, or ``(1,)`` for all channels."""
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if mask is not None:
            dtype = x.dtype if self.running_mean is None else self.running_mean.dtype
            weight, bias = self._masked_affine(mask.expand(x.shape[1]).contiguous(), dtype)
        own = (self.training and not self.spec.fixed) or self.running_mean is None
        moments = self.running_mean, self.running_var
        if self.spec.kind == "instance":
            return F.instance_norm(x, *moments, weight, bias, own, self.momentum or 0.0, self.spec.eps)
        momentum = 0.0
        if own and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        return F.batch_norm(x, *moments, weight, bias, own, momentum, self.spec.eps)


class TaskLayerNorm(TaskNorm):
    """Layer or RMS normalisation of one task over the last dimensions, with statistics of the units in the mask."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Normalise ``x``, ``(…, *shape)``, over the units in ``mask``, which broadcasts over ``shape``."""
        shape, eps, centred = self.spec.shape, self.spec.eps, self.spec.kind == "layer"
        if mask is None:
            if centred:
                return F.layer_norm(x, shape, self.weight, self.bias, eps)
            return F.rms_norm(x, shape, self.weight, eps)
        weight, bias = self._masked_affine(mask, x.dtype)
        normal = _normalise(x, mask.expand(shape), tuple(range(-len(shape), 0)), eps, centred)
        return torch.addcmul(bias, normal, weight)


class TaskGroupNorm(TaskNorm):
    """Normalisation of one task over groups of channels, with statistics of the units in the mask."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Normalise ``x``, ``(batch, channels, …)``; ``mask``: ``(channels,)``, or ``(1,)`` for all channels."""
        if mask is None:
            return F.group_norm(x, self.spec.groups, self.weight, self.bias, self.spec.eps)
        mask = mask.expand(x.shape[1]).contiguous()
        weight, bias = self._masked_affine(mask, x.dtype)
        grouped = x.reshape(len(x), self.spec.groups, x.shape[1] // self.spec.groups, -1)
        of_group = mask.reshape(self.spec.groups, -1, 1).expand(grouped.shape[1:])
        normal = _normalise(grouped, of_group, (-2, -1), self.spec.eps, centred=True).reshape(x.shape)
        per_channel = (len(weight), *(1,) * (x.dim() - 2))
        return normal * weight.reshape(per_channel) + bias.reshape(per_channel)


def _normalise(x: Tensor, mask: Tensor, dims: tuple[int, ...], eps: float, centred: bool) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))  # as in torch's norms: squares overflow in half precision
    mask = mask.to(x.dtype)
    count = mask.sum(dims, keepdim=True).clamp_min(1e-6)  # a group without open units: all its values are zero
    if centred:
        x = x - x.sum(dims, keepdim=True) / count
    variance = (x.square() * mask).sum(dims, keepdim=True) / count
    return (x * (variance + eps).rsqrt()).to(dtype)


_NORMS: dict[NormKind, type[TaskNorm]] = {
    "batch": TaskBatchNorm,
    "instance": TaskBatchNorm,
    "layer": TaskLayerNorm,
    "rms": TaskLayerNorm,
    "group": TaskGroupNorm,
}


@dataclass(frozen=True)
class OwnedSpec:
    """Description of a task-owned module or parameter, from which :meth:`make` makes a task's copy."""

    name: str
    parameters: tuple[str | None, ...] = ()
    kind: NormKind | None = None
    eps: float = 0.0
    momentum: float | None = None
    groups: int = 1
    shape: tuple[int, ...] = ()
    statistics: tuple[str, ...] = ()
    sets: Tensor | None = None
    fixed: bool = False

    def make(self, backbone: nn.Module) -> nn.Module:
        """Return a new copy of the described module or parameter, with the backbone's values."""
        known: Mapping[str, Tensor] = dict((*backbone.named_parameters(), *backbone.named_buffers()))
        if self.kind is None:
            if self.name in known:
                return OwnParameter(known[self.name])
            try:
                return copy.deepcopy(backbone.get_submodule(self.name))
            except RuntimeError as error:  # it contains tensors computed from parameters
                raise ModelError(
                    f"task_owned module {self.name!r} can't be copied ({error}): use torch.nn.utils.parametrizations"
                ) from error
        return _NORMS[self.kind](self, known)


class OwnModules(nn.ModuleDict):
    """A task's own copies of backbone modules (without its head), by the module's name inside the backbone."""

    learning = True

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__({name.replace(".", "/"): module for name, module in modules.items()})
        self._learns = [parameter.requires_grad for parameter in self.parameters()]

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(key.replace(".", "/"))  # torch forbids dots in module names

    def train(self, mode: bool = True) -> OwnModules:
        """Set training mode if both ``mode`` and ``learning`` are True, otherwise evaluation mode."""
        super().train(mode and self.learning)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> OwnModules:
        """Set ``requires_grad`` of all parameters except those frozen in the backbone."""
        for parameter, learns in zip(self.parameters(), self._learns, strict=True):
            parameter.requires_grad_(requires_grad and learns)
        return self

    def learn(self, learning: bool, mode: bool) -> None:
        """Turn updates of the running statistics on (``learning`` True) or off, and set training mode to ``mode``."""
        self.learning = learning
        self.train(mode)

    def finish(self, fresh: OwnModules, owned: Mapping[str, OwnedSpec], use: Tensor) -> None:
        """Set evaluation mode, and reset norm entries of units outside the mask ``use`` to the values in ``fresh``."""
        self.learn(False, False)
        for name, spec in owned.items():
            mine, template = self[name], fresh[name]
            if isinstance(mine, TaskNorm) and isinstance(template, TaskNorm) and spec.sets is not None:
                mine.reset_unused(template, use[spec.sets.to(use.device)])
