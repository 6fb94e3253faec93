"""The unit graph: the units (masked layer outputs) that each parameter connects, and so the parameters a mask uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.unit_graph.backbones import Inputs
from avalanche_amnesia.unit_graph.findings import Finding
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec
from avalanche_amnesia.unit_graph.values import ALWAYS, Dependence, ParameterValue, UnitSets, compact

Between = Literal["min", "max"]
Key = TypeVar("Key")
Item = TypeVar("Item")
LayerKey = tuple[tuple[tuple[str, int | None], ...], str, int]
"""Key of a layer: its weight's parameters with hashes of the used entries (None: all), its kind and number of units."""
_MUCH_LESS = 0.6
"""Largest share of used weight entries at which computing only these is faster: ``benchmarks/open_entries.py``."""


class OpenEntries(NamedTuple):
    """Part of a weight that a mask uses: indices of rows and columns (None: all); ``saved``: fraction not used."""

    rows: Tensor | None
    columns: Tensor | None
    saved: float


class LazyMapping(Mapping[Key, Item]):
    """Mapping that computes its values at each access, because stored values would be as large as the network."""

    def __init__(self, keys: Collection[Key], compute: Callable[[Key], Item]) -> None:
        self._keys, self._compute = keys, compute

    def __getitem__(self, key: Key) -> Item:
        if key not in self._keys:
            raise KeyError(key)
        return self._compute(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True)
class WeightedLayer:
    """Description of a layer with weights; its outputs (neurons or channels) are the units that masks select."""

    name: str
    units: int  # number of outputs
    kind: str
    sets: Tensor  # id, in UnitSets, of each unit's one-element set


@dataclass(frozen=True)
class UnitGraph:
    """The weighted layers of a backbone in execution order, and for each parameter the units that use its entries.

    Attributes:
        layers: weighted layers, by name.
        sets: all sets of units, by the ids used in ``factors`` and ``output``.
        factors: parameter name → tensors of set ids that broadcast over the parameter; an entry is in use if all
            its sets are (its unit, and the units that feed it).
        output: set id of each feature, ``(features,)``.
        owned: names of task-owned parameters.
        frozen: names of parameters declared to be trained only by the first task.
        inputs: the backbone's inputs.
    """

    layers: Mapping[str, WeightedLayer]
    sets: UnitSets
    factors: Mapping[str, tuple[Tensor, ...]]
    output: Tensor
    owned: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    inputs: Inputs = field(default_factory=lambda: Inputs((), ()))

    def __deepcopy__(self, memo: object) -> UnitGraph:
        return self  # immutable; a copy of all sets would be the largest part of a model's copy

    def parameter_use(self, *masks: Mapping[str, Tensor], between: Between = "min") -> Mapping[str, Tensor]:
        """Return how much masks use each parameter entry: ``min`` of the masks of its output unit and its input unit.

        Of weight ``ij`` in layer ``l``: ``min(a_{l,i}, a_{l−1,j})``; of bias ``i``: ``a_{l,i}``. With HAT's cumulative
        mask (Serrà et al., ICML 2018) it is the share of the update that is blocked, with AdaHAT's summative mask
        (Wang et al., ECML-PKDD 2024) the importance.

        Args:
            masks: one mapping per task, layer name → mask of shape ``(units,)``, bool or float. Uses of several tasks
                add up (AdaHAT's summative mask); one mapping gives the parameters that one mask covers.
            between: ``min``, or ``max``: ``max(a_{l,i}, a_{l−1,j})``, where an unmasked source (the network's input)
                is ignored. The result is never below ``min``.

        Returns:
            Parameter name (inside the backbone) → float32 tensor that broadcasts over the parameter, computed at each
            access.
        """
        vectors = [torch.cat([mask[name].float() for name in self.layers]) for mask in masks]
        return LazyMapping(self.factors, partial(self._use_of, self.sets.use(torch.stack(vectors)).sum(0), between))

    def _use_of(self, of_sets: Tensor, between: Between, name: str) -> Tensor:
        factors = [factor.to(of_sets.device) for factor in self.factors[name]]
        least = reduce(torch.minimum, (of_sets[factor] for factor in factors))
        if between == "min":
            return least
        sources = of_sets.clone()
        sources[ALWAYS] = 0
        return reduce(torch.maximum, (sources[factor] for factor in factors), least)

    def used_entries(self, mask: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a mapping of parameter name to bool tensor: True at entries that the network uses under ``mask``.

        Args:
            mask: layer name → ``(units,)``, bool.

        Returns:
            Parameter name (inside the backbone) → bool tensor that broadcasts over it, computed at each access.
        """
        units = torch.cat([mask[name].float() for name in self.layers])
        in_use = self.sets.use(units).cpu().numpy() > 0

        def cover(name: str) -> Tensor:
            factors = (in_use[factor.numpy()] for factor in self.factors[name])
            entries = np.asarray(reduce(np.logical_and, factors))  # ten times as fast as in torch
            return torch.from_numpy(entries).to(units.device)

        return LazyMapping(self.factors, cover)

    def open_entries(self, units: Tensor) -> dict[str, OpenEntries]:
        """Return the rows and columns used by mask ``units``, ``(n_units,)``, for weights with many unused entries."""
        of_sets = (self.sets.use(units.float()) > 0).cpu().numpy()  # numpy is faster for few numbers
        found = {}
        for name, factors in self.factors.items():
            others = (size for axis, factor in enumerate(factors) for at, size in enumerate(factor.shape) if at != axis)
            if len(factors) != 2 or any(size > 1 for size in others):  # skip unless each varies along its own axis
                continue
            read = [of_sets[factor.numpy().reshape(-1)] for factor in factors]
            share = float(read[0].mean() * read[1].mean())
            if 0 < share <= _MUCH_LESS:
                chosen = (None if part.all() else torch.from_numpy(np.flatnonzero(part)) for part in read)
                rows, columns = (part if part is None else part.to(units.device) for part in chosen)
                found[name] = OpenEntries(rows, columns, 1 - share)
        return found

    def sources(self, layer: str) -> Tensor | None:
        """Return the id of the unit set that each input of a layer depends on; None if no inputs are recorded."""
        factors = next((f for name, f in self.factors.items() if name.startswith(layer) and len(f) > 1), None)
        return None if factors is None else compact(factors[1]).reshape(-1)

    def layer_index(self, parameter: str) -> int:
        """Return the index of the layer that a parameter belongs to: the layer of its first unit."""
        return self._layer_of[parameter]

    @cached_property
    def _layer_of(self) -> dict[str, int]:
        starts = torch.tensor([0, *(layer.units for layer in self.layers.values())]).cumsum(0)
        numbers = {name: int(factors[0].reshape(-1)[0]) for name, factors in self.factors.items()}
        first = {name: next(iter(self.sets.members(number)), 0) for name, number in numbers.items()}
        return {name: int(torch.searchsorted(starts, unit, right=True)) - 1 for name, unit in first.items()}


@dataclass
class Draft:
    """A unit graph (the units that each parameter connects) under construction, filled by tracing a backbone twice."""

    ungated: frozenset[LayerKey] = frozenset()  # layers whose outputs get no gate, see layers_without_mask()
    biases: set[str] = field(default_factory=set)  # of layers with gates
    loose: set[str] = field(default_factory=set)  # biases without a gate: each task needs its own copy
    sets: UnitSets = field(default_factory=UnitSets)
    layers: dict[str, WeightedLayer] = field(default_factory=dict)
    factors: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    owned: dict[str, OwnedSpec] = field(default_factory=dict)
    indices: dict[str, Tensor] = field(default_factory=dict)
    frozen_modules: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    _names: dict[LayerKey, str] = field(default_factory=dict)
    _plain: dict[LayerKey, str] = field(default_factory=dict)  # names of weights that are one parameter each

    def get_or_add_layer(self, weight: ParameterValue, wanted: Sequence[str], kind: str, units: int) -> WeightedLayer:
        """Return a weight's layer in this graph; if missing, add it under the first free name in ``wanted``."""
        places = tuple((p.name, None if p.is_identity else hash(p.index.numpy().tobytes())) for p in weight.parts)
        key = (places, kind, units)
        if key not in self._names:
            taken = set(self._names.values())
            numbered = (f"{wanted[0]}#{count}" for count in range(1, len(taken) + 2))
            self._names[key] = next(name for name in (*wanted, *numbered) if name and name not in taken)
            part = weight.parts[0]
            plain = part.is_identity or (part.group is None and part.index.numel() == part.size.numel())
            if len(weight.parts) == 1 and plain:
                self._plain[key] = part.name
        name = self._names[key]
        if key in self.ungated:
            return WeightedLayer(name, units, kind, torch.full((units,), ALWAYS))
        if name not in self.layers:
            self.layers[name] = WeightedLayer(name, units, kind, self.sets.add_layer(units))
        return self.layers[name]

    def record(self, parameter: ParameterValue, *factors: Tensor) -> None:
        """Record which units use each entry of a parameter, e.g. its output and input: unit-set ids in ``factors``."""
        for part in parameter.parts:
            if part.owned:
                continue
            new = (torch.full((1,) * len(part.size), ALWAYS),) if part.frozen else self._source_factors(part, factors)
            if len(new) > 1 and bool((new[0] == ALWAYS).all()):
                new = new[1:]  # outputs without a gate: an entry belongs to its source
            known = self.factors.get(part.name)
            if known is not None:
                # An entry is in use if all factors of one of its uses are. The union of the factors may overestimate
                # the use, but never underestimates it. Repeated factors change nothing.
                count = max(len(known), len(new))
                known, new = ((*held, *held[-1:] * (count - len(held))) for held in (known, new))
                new = tuple(self.sets.union(a, b) for a, b in zip(known, new, strict=True))
            self.factors[part.name] = tuple(map(compact, new))

    def layers_without_mask(self, output: Tensor) -> tuple[frozenset[LayerKey], set[str]]:
        """Return the layers whose weights are protected by the masks of their inputs alone, and their biases' names.

        An example is the output of a low-rank adapter: every task reads the sum it is added to. Without a gate a
        weight belongs to its input unit (a rank) and reaches every output. The names of the layers' biases are
        returned as well, because without a gate they would belong to all tasks at once.
        """
        n_factors = torch.zeros(self.sets.n_units, dtype=torch.long)  # number of factors that contain each unit
        for factor in (*(f for factors in self.factors.values() for f in factors), output):
            n_factors[sorted({unit for number in factor.unique().tolist() for unit in self.sets.members(number)})] += 1
        keys, biases = set(), set[str]()
        for key, weight in self._plain.items():
            factors, sets = self.factors.get(weight, ()), self.layers[self._names[key]].sets
            if len(factors) != 2 or any(len(self.sets.members(n)) != 1 for n in factors[1].unique().tolist()):
                continue  # an input depends on no unit or on several, so that no single unit owns its weights
            own = {bias for bias in self.biases & self.factors.keys() if _is_whole_layer(self.factors[bias][0], sets)}
            first = self.sets.members(int(sets[0]))[0]
            if _is_whole_layer(factors[0], sets) and bool((n_factors[first : first + len(sets)] == 1 + len(own)).all()):
                keys.add(key)
                biases |= own
        return frozenset(keys), biases

    def _source_factors(self, part: Dependence, factors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Convert the unit-set ids ``factors`` of a computed weight to ids for the parameter it is computed from."""
        if part.is_identity:
            return factors
        count = part.size.numel() if part.group is None else int(part.group.max()) + 1
        found = []
        for factor in factors:
            merged = self.sets.merge(part.index, factor.expand(part.index.shape), count)
            found.append((merged if part.group is None else merged[part.group]).reshape(part.size))
        return tuple(found)


def _is_whole_layer(factor: Tensor, sets: Tensor) -> bool:
    """Return True if ``factor`` contains exactly the ids ``sets`` of all units of a layer, in the same order."""
    return torch.equal(factor.reshape(-1), sets)
