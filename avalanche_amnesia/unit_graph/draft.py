"""Layers, uses of parameters and findings, collected by walks over a backbone's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.unit_graph.findings import Finding
from avalanche_amnesia.unit_graph.graph import WeightedLayer
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec
from avalanche_amnesia.unit_graph.units import ALWAYS, NOTHING, UnitSets, compact
from avalanche_amnesia.unit_graph.values import Dependence, ParameterValue


@dataclass
class Draft:
    """Draft of a unit graph; the walks in training and in evaluation mode write into one."""

    sets: UnitSets = field(default_factory=UnitSets)
    layers: dict[str, WeightedLayer] = field(default_factory=dict)
    factors: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    owned: dict[str, OwnedSpec] = field(default_factory=dict)
    indices: dict[str, Tensor] = field(default_factory=dict)
    frozen_modules: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    _names: dict[Any, str] = field(default_factory=dict)

    def layer_of(self, weight: ParameterValue, wanted: Sequence[str], kind: str, units: int) -> WeightedLayer:
        """The layer that a weight makes: the same at every call, and in both modes."""
        places = tuple((p.name, None if p.whole else hash(p.place.numpy().tobytes())) for p in weight.parts)
        key = (places, kind, units)
        if key not in self._names:
            taken = set(self._names.values())
            numbered = (f"{wanted[0]}#{count}" for count in range(1, len(taken) + 2))
            self._names[key] = next(name for name in (*wanted, *numbered) if name and name not in taken)
        name = self._names[key]
        if name not in self.layers:
            self.layers[name] = WeightedLayer(name, units, kind, self.sets.add_layer(units))
        return self.layers[name]

    def use(self, parameter: ParameterValue, *factors: Tensor) -> None:
        """Note that parameters are used: an entry of what they make is in use where all the sets of the factors are."""
        for part in parameter.parts:
            if part.owned:
                continue
            new = (torch.full((1,) * len(part.size), ALWAYS),) if part.frozen else self._of_entries(part, factors)
            known = self.factors.get(part.name)
            if known is not None:
                # An entry is in use by either: all factors of the one, or all of the other. Taken factor by factor
                # that counts more as in use, never less; and a factor more that repeats one changes nothing.
                count = max(len(known), len(new))
                known, new = ((*held, *held[-1:] * (count - len(held))) for held in (known, new))
                new = tuple(self.sets.union(a, b) for a, b in zip(known, new, strict=True))
            self.factors[part.name] = tuple(map(compact, new))

    def _of_entries(self, part: Dependence, factors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Factors over what is computed as factors over the parameter."""
        if part.whole:
            return factors
        if part.group is None and _is_rows(part.place, part.size):
            return tuple(_rows_of(factor, part.place, part.size) for factor in factors)
        count = part.size.numel() if part.group is None else int(part.group.max()) + 1
        found = []
        for factor in factors:
            merged = self.sets.merge(part.place, factor.expand(part.place.shape), count)
            found.append((merged if part.group is None else merged[part.group]).reshape(part.size))
        return tuple(found)


def _is_rows(index: Tensor, shape: Sequence[int]) -> bool:
    """Tell whether a part of a parameter is some of its rows, one after the other."""
    whole = index.dim() == len(shape) and tuple(index.shape[1:]) == tuple(shape[1:])
    return whole and torch.equal(index.reshape(-1), torch.arange(int(index.min()), int(index.min()) + index.numel()))


def _rows_of(factor: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """Factor of some rows as one of all rows; nothing is known of the others."""
    first = int(index.min()) * shape[0] // int(torch.tensor(shape).prod())
    rows = torch.full((shape[0], *factor.shape[1:]), NOTHING)
    rows[first : first + len(index)] = factor
    return rows
