"""Inventory of a backbone's parameters for weight masks: masked ones, and a rule for every other trainable one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from avalanche_amnesia import checks
from avalanche_amnesia.models.substitutes import NORMS
from avalanche_amnesia.models.weight_choice import count_of_share
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.graph import LazyMapping

BiasRule = Literal["off", "masked"]
NormRule = Literal["task", "batch"]

_WEIGHTED = (nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding)


@dataclass(frozen=True)
class MaskedTensor:
    """Masked parameter of the backbone: every task uses its ``kept`` best-scored entries."""

    shape: torch.Size
    kept: int

    @property
    def size(self) -> int:
        """Return the number of the parameter's entries."""
        return self.shape.numel()


@dataclass(frozen=True)
class WeightCover:
    """Table of a backbone's masked parameters, in the order of their entries in a mask vector."""

    layers: Mapping[str, MaskedTensor]

    def parameter_use(self, *masks: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return, by parameter name, the number of ``masks`` that contain each entry, in the parameter's shape."""
        plain = [dict(mask) for mask in masks]  # a deep copy of the strategy can't copy mapping proxies
        return LazyMapping(self.layers, partial(self._use_of, plain))

    def _use_of(self, masks: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
        return torch.stack([mask[name].float() for mask in masks]).sum(0).reshape(self.layers[name].shape)

    def used_entries(self, mask: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Convert a mask to a dict of parameter name to bool tensor in the parameter's shape, True at used weights."""
        return {name: mask[name].bool().reshape(tensor.shape) for name, tensor in self.layers.items()}

    def layer_index(self, parameter: str) -> int:
        """Return the index of a masked parameter's layer; here every masked parameter counts as a layer of its own."""
        return list(self.layers).index(parameter)


Site = tuple[nn.Module, str]
Inventory = tuple[WeightCover, dict[str, list[Site]], list[Site]]
"""Masked parameters, their places in the backbone's modules, and the places of the biases to remove."""


def take_inventory(backbone: nn.Module, density: float, bias: BiasRule, norm: NormRule) -> Inventory:
    """Return the parameters to mask, their modules, and biases to remove; raise ModelError if one is not supported."""
    checks.within("density", density, "(0, 1]")
    checks.one_of("bias", bias, BiasRule)
    checks.one_of("norm", norm, NormRule)
    layers: dict[str, MaskedTensor] = {}
    sites: dict[str, list[Site]] = {}
    biases: list[Site] = []
    for name, parameter in backbone.named_parameters():
        held = [(m, at) for m in backbone.modules() for at, value in m._parameters.items() if value is parameter]
        rule = _rule_for(backbone, name, parameter, held)
        if rule == "bias" and bias == "off":
            biases += held
        elif rule in ("weight", "bias"):
            layers[name] = MaskedTensor(parameter.shape, count_of_share(density, parameter.numel()))
            sites[name] = held
    if not layers:
        raise ModelError(f"{type(backbone).__name__} has no Linear, Conv or Embedding whose weights a mask could cover")
    return WeightCover(layers), sites, biases


def _rule_for(backbone: nn.Module, name: str, parameter: nn.Parameter, sites: list[Site]) -> str:
    modules = [module for module, _ in sites]
    if all(isinstance(module, NORMS) for module in modules):
        return "norm"
    if not parameter.requires_grad:
        return "constant"  # frozen by the user: all tasks use it, none changes it
    owner = next((module for module in modules if isinstance(module, _WEIGHTED)), None)
    if owner is None or any(isinstance(module, NORMS) for module in modules):
        raise ModelError(
            f"parameter {name!r} of {type(backbone).__name__}, held by {type(modules[0]).__name__}: without an owner, "
            "one task's training would change others. Compute with it through a Linear, Conv or Embedding, freeze it "
            "with requires_grad_(False), or take weight pools, DisjointModel(backbone)"
        )
    if isinstance(owner, nn.Embedding) and (owner.max_norm is not None or owner.sparse):
        raise ModelError(
            f"parameter {name!r} of {type(backbone).__name__}: an Embedding with max_norm= writes into its weights as "
            "it reads them, and one with sparse=True has no dense gradient; make it without them"
        )
    return "bias" if all(attribute == "bias" for _, attribute in sites) else "weight"


def strip_normalisation(norms: Iterable[nn.Module]) -> None:
    """Remove running statistics, scale and shift of norms, so that they use statistics of the batch (or sample)."""
    for module in norms:
        for held in (module._parameters, module._buffers):
            held.update(dict.fromkeys(held))
        for flag in {"affine", "elementwise_affine", "track_running_stats"} & vars(module).keys():
            setattr(module, flag, False)
