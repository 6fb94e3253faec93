"""The unit graph: which earlier units feed each weight of a backbone, and how much of it masks put to use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from avalanche_amnesia.models.units import Units


class ModelError(ValueError):
    """A backbone can't be masked; the message names the module or operation, the reason, and a way out."""


@dataclass(frozen=True)
class WeightedLayer:
    """One Linear or Conv of the backbone.

    Attributes:
        name: the module's name inside the backbone.
        units: its outputs (neurons or channels).
        sources: the units behind its inputs, one entry per input channel or feature.
        groups: a convolution's groups, otherwise 1.
        weight_ndim: dimensions of its weight.
        bias: whether it has one.
    """

    name: str
    units: int
    sources: Units
    groups: int
    weight_ndim: int
    bias: bool

    def weight_use(self, of_units: Tensor, of_inputs: Tensor) -> Tensor:
        """``min(a_{l,i}, a_{l-1,j})`` per weight, ``(units, inputs/groups, 1…)``: broadcasts over the kernel."""
        per_group = of_inputs.reshape(self.groups, 1, -1)
        rows = torch.minimum(of_units.reshape(self.groups, -1, 1), per_group)
        return rows.reshape(self.units, -1, *(1,) * (self.weight_ndim - 2))


@dataclass(frozen=True)
class UnitGraph:
    """The weighted layers of a backbone in the order they run, and the units behind its output.

    Attributes:
        layers: by name.
        output: the units behind the features, one entry per feature.
    """

    layers: Mapping[str, WeightedLayer]
    output: Units

    def parameter_use(self, *masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How much every parameter is in use: ``min`` of its unit's and its source's use (METHOD §2, §3).

        Args:
            masks: one mapping per task, layer name → mask of shape ``(units,)``, bool or float. Uses of several tasks
                add up (AdaHAT's summative mask); one mapping gives the parameters that one mask covers.

        Returns:
            Parameter name (inside the backbone) → float32 tensor that broadcasts over the parameter.
        """
        uses: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            of_units = torch.stack([mask[name].float() for mask in masks]).sum(0)
            of_inputs = torch.stack(
                [layer.sources.usage({k: v.float() for k, v in mask.items()}) for mask in masks]
            ).sum(0)
            uses[f"{name}.weight"] = layer.weight_use(of_units, of_inputs)
            if layer.bias:
                uses[f"{name}.bias"] = of_units
        return uses
