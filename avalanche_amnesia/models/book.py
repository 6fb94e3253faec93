"""What walks over a backbone's graph write down: layers, what every parameter is used with, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from avalanche_amnesia.models.findings import Finding, Refused
from avalanche_amnesia.models.graph import WeightedLayer
from avalanche_amnesia.models.task_owned import OwnedSpec
from avalanche_amnesia.models.units import ALWAYS, NOTHING, UnitSets, compact
from avalanche_amnesia.models.values import ParameterValue


@dataclass
class Book:
    """What walks over a backbone find out; the walks in training and in evaluation mode write into one."""

    sets: UnitSets = field(default_factory=UnitSets)
    layers: dict[str, WeightedLayer] = field(default_factory=dict)
    factors: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    owned: dict[str, OwnedSpec] = field(default_factory=dict)
    indices: dict[str, Tensor] = field(default_factory=dict)
    frozen_modules: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def layer(self, name: str, kind: str, units: int) -> WeightedLayer:
        """The layer of this name, made where it is new."""
        if name not in self.layers:
            self.layers[name] = WeightedLayer(name, units, kind, self.sets.add_layer(units))
        return self.layers[name]

    def use(self, parameter: ParameterValue, shape: Sequence[int], *factors: Tensor) -> None:
        """Note that a parameter is used: its entries are in use where all the sets of the factors are.

        Args:
            parameter: the whole parameter, or the part that is used.
            shape: of the whole parameter.
            factors: each broadcasts over the part.
        """
        if parameter.owned:
            return
        count = int(torch.tensor(shape).prod())
        index = parameter.index
        if parameter.frozen:
            new: tuple[Tensor, ...] = (torch.full((1,) * len(shape), ALWAYS),)
        elif tuple(index.shape) == tuple(shape) and torch.equal(index.reshape(-1), torch.arange(count)):
            new = factors
        elif _is_rows(index, shape):
            new = tuple(_rows_of(factor, index, shape) for factor in factors)
        else:
            new = tuple(
                self.sets.merge(index, factor.expand(torch.broadcast_shapes(factor.shape, index.shape)), count).reshape(
                    tuple(shape)
                )
                for factor in factors
            )
        known = self.factors.get(parameter.name)
        if known is not None:
            if len(known) != len(new):
                raise Refused(f"parameter {parameter.name} is used in two unlike ways", "use two parameters")
            new = tuple(self.sets.union(a, b) for a, b in zip(known, new, strict=True))
        self.factors[parameter.name] = tuple(map(compact, new))


def _is_rows(index: Tensor, shape: Sequence[int]) -> bool:
    """Whether a part of a parameter is some of its rows, one after the other."""
    whole = index.dim() == len(shape) and tuple(index.shape[1:]) == tuple(shape[1:])
    return whole and torch.equal(index.reshape(-1), torch.arange(int(index.min()), int(index.min()) + index.numel()))


def _rows_of(factor: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """A factor of some rows as one of all rows: nothing is known of the others."""
    first = int(index.min()) * shape[0] // int(torch.tensor(shape).prod())
    rows = torch.full((shape[0], *factor.shape[1:]), NOTHING)
    rows[first : first + len(index)] = factor
    return rows
