"""Classes for the values in a traced graph: the units or parameters that each entry of a tensor depends on.

Each value has an integer tensor of the same shape, whose entries name *sets* of units. An entry is zero if all
units of its set are masked. Reshaping, slicing and concatenating apply the same operation to that tensor. A sum
of values takes the union of their sets, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

ALWAYS = 0
"""Id of the set that no mask affects: the network's input, or entries that may be non-zero under every mask."""
NOTHING = 1
"""Id of the empty set: an entry that is zero under every mask (padding)."""

# The number of sets explodes if channels and positions mix repeatedly (MLP-Mixer). Beyond these bounds an entry
# counts as always in use, which protects more than necessary.
_MOST_UNIONS = 2_000_000
_MOST_PAIRS = 100_000
_MOST_SETS = 400_000


class UnitSets:
    """Table that gives each set of units an id; a tensor of ids then stores which units each entry depends on."""

    def __init__(self) -> None:
        self.n_units = 0
        self._sets: list[frozenset[int]] = [frozenset({-1}), frozenset()]  # -1 stands for "always"
        self._number = {members: number for number, members in enumerate(self._sets)}
        self._tables: list[tuple[Tensor, Tensor]] | None = None

    def __len__(self) -> int:
        return len(self._sets)

    def add_layer(self, units: int) -> Tensor:
        """Add a layer of ``units`` new units; return the id of each unit's one-element set, ``(units,)``."""
        first = self.n_units
        self.n_units += units
        return torch.tensor([self._number_of(frozenset({unit})) for unit in range(first, self.n_units)])

    def _number_of(self, members: frozenset[int]) -> int:
        if -1 in members:
            return ALWAYS
        number = self._number.get(members)
        if number is None:
            number = self._number[members] = len(self._sets)
            self._sets.append(members)
            self._tables = None
        return number

    def members(self, set_id: int) -> list[int]:
        """Return the sorted units of a set; empty for ``ALWAYS`` (no mask applies) and ``NOTHING`` (padding)."""
        return sorted(self._sets[set_id] - {-1})

    def union(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the ids of the unions of the sets with ids ``first`` and ``second``, by entry, with broadcasting."""
        first, second = torch.broadcast_tensors(first, second)
        a, b = torch.broadcast_tensors(compact(first), compact(second))
        if torch.equal(a, b):
            return first
        apart = (a == NOTHING) | (b == NOTHING)
        if bool(apart.all()):
            return torch.where(a == NOTHING, b, a).expand(first.shape)
        pairs, place = torch.stack([a.reshape(-1), b.reshape(-1)]).unique(dim=1, return_inverse=True)
        if pairs.shape[1] > _MOST_PAIRS or len(self._sets) > _MOST_SETS:
            return torch.full((), ALWAYS).expand(first.shape)
        numbers = torch.tensor([self._number_of(self._sets[i] | self._sets[j]) for i, j in pairs.T.tolist()])
        return numbers[place].reshape(a.shape).expand(first.shape)

    def merge(self, groups: Tensor, ids: Tensor, n_groups: int) -> Tensor:
        """Unite the sets ``ids[i]`` with the same ``groups[i]``; return an id per group, ``NOTHING`` if it is empty."""
        a, b = torch.broadcast_tensors(*map(compact, torch.broadcast_tensors(groups, ids)))
        group, number = a.reshape(-1), b.reshape(-1)
        if bool((torch.bincount(group) > 1).any()):  # sorting is slow: skip it if no group has several entries
            group, number = torch.stack([group, number], 1).unique(dim=0).T
        result = torch.full((n_groups,), NOTHING)
        result[group] = number
        counts = torch.bincount(group, minlength=n_groups)
        several = counts[group] > 1
        if int(several.sum()) > _MOST_UNIONS:
            result[group[several]] = ALWAYS
            return result
        known: dict[tuple[int, ...], int] = {}
        starts = counts.cumsum(0) - counts
        for of_group in (counts > 1).nonzero()[:, 0].tolist():
            key = tuple(number[starts[of_group] : starts[of_group] + counts[of_group]].tolist())
            if key not in known:
                known[key] = self._number_of(frozenset().union(*(self._sets[i] for i in key)))
            result[of_group] = known[key]
        return result

    def union_along(self, ids: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        """Return the ids of the sets united along ``dims``, in the shape of ``torch.sum(ids, dims, keepdim)``."""
        dims = [dim % ids.dim() for dim in dims]
        small = compact(ids)
        shape = [1 if dim in dims else size for dim, size in enumerate(small.shape)]
        merged = self.merge(torch.arange(prod(shape)).reshape(shape), small, prod(shape)).reshape(shape)
        merged = merged.expand([1 if dim in dims else size for dim, size in enumerate(ids.shape)])
        return merged if keepdim else merged.squeeze(dims)

    # Use of sets under masks ----------------------------------------------------------------------------------

    def table(self, set_ids: Sequence[int]) -> Tensor:
        """Return a column of unit indices per set, padded by repeats; ``n_units`` means always on, the next one off."""
        ends = {ALWAYS: [self.n_units], NOTHING: [self.n_units + 1]}
        rows = [ends.get(set_id) or sorted(self._sets[set_id]) for set_id in set_ids]
        width = max(map(len, rows))
        return torch.tensor([row + row[:1] * (width - len(row)) for row in rows]).T.contiguous()

    def tables(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return all sets, grouped by size: ids ``(k,)`` and a :meth:`table` ``(units, k)`` of each group's units."""
        if self._tables is None or self._tables[0][0].device != device:
            by_size: dict[int, list[int]] = {}
            for number, members in enumerate(self._sets):
                by_size.setdefault((max(1, len(members)) - 1).bit_length(), []).append(number)
            self._tables = [(torch.tensor(each).to(device), self.table(each).to(device)) for each in by_size.values()]
        return self._tables

    def use(self, masks: Tensor) -> Tensor:
        """Return the mask value of every set: the maximum of ``masks``, ``(…, n_units)``, over the units in the set."""
        ends = masks.new_tensor([1.0, 0.0]).expand(*masks.shape[:-1], 2)
        known = torch.cat([masks, ends], -1)
        result = known.new_empty(*masks.shape[:-1], len(self._sets))
        for numbers, table in self.tables(masks.device):
            result[..., numbers] = known[..., table].amax(-2)
        return result


def compact(ids: Tensor) -> Tensor:
    """Return ``ids`` with size 1 along axes where it is constant; the result broadcasts to the original."""
    for dim in range(ids.dim()):
        if ids.shape[dim] > 1 and (ids.stride(dim) == 0 or bool((ids == ids.narrow(dim, 0, 1)).all())):
            ids = ids.narrow(dim, 0, 1)
    return ids


# Knowledge of a value ------------------------------------------------------------------------------------------------


class Masked(IntEnum):
    """Content of a traced tensor at entries of masked units: zero, a constant, or values that other tasks change."""

    ZERO = 0
    """Exactly zero."""
    CONSTANT = 1
    """A number that no parameter of another task changes, such as one half after a sigmoid."""
    DIRTY = 2
    """A number that other tasks' parameters may change: it must be masked before another operation reads it."""


@dataclass(frozen=True)
class Value:
    """Traced tensor: which units each entry depends on, and whether masked entries are zero.

    Every entry is a function of the input and of parameters that the task's mask protects, unless it is DIRTY.
    """

    ids: Tensor
    masked: Masked = Masked.ZERO

    def __post_init__(self) -> None:
        if self.masked is not Masked.ZERO:  # padding that is no longer zero is in use under every mask
            object.__setattr__(self, "ids", filled(self.ids))

    @property
    def shape(self) -> torch.Size:
        """Return the tensor's shape for a batch of ``EXPORTED_BATCH`` samples."""
        return self.ids.shape

    def like(self, ids: Tensor | None = None, masked: Masked | None = None) -> Value:
        """Return a copy of this traced tensor's description, with ``ids`` or ``masked`` replaced if given."""
        return Value(self.ids if ids is None else ids, self.masked if masked is None else masked)

    @property
    def always(self) -> bool:
        """Return True if the entries of this tensor are the same under every mask."""
        return bool((self.ids == ALWAYS).all())


@dataclass(frozen=True)
class Dependence:
    """Map from each entry of a computed tensor to the entries of one parameter that it depends on.

    The parameter's entries fall into groups; an entry of the tensor depends on all entries of one group.
    """

    name: str
    size: torch.Size
    moved_to: Tensor | None = None
    group: Tensor | None = None
    frozen: bool = False
    owned: bool = False

    @cached_property
    def index(self) -> Tensor:
        """Return, for each entry of the computed tensor, the index of the parameter entry or group it depends on."""
        # Computed on demand, because most parameters are used directly and the numbers take more memory.
        return torch.arange(self.size.numel()).reshape(self.size) if self.moved_to is None else self.moved_to

    @property
    def is_identity(self) -> bool:
        """Return True if the computed tensor is the parameter itself, with no entry moved or combined."""
        if self.group is not None or self.moved_to is None:
            return self.group is None
        counts_up = self.moved_to.is_contiguous() and self.moved_to.shape == self.size
        return counts_up and torch.equal(self.moved_to.reshape(-1), torch.arange(self.size.numel()))

    def combine_entries(self, result: Tensor) -> Dependence:
        """Return the dependence of a reduced tensor, e.g. a sum: entry ``j`` contributes to entry ``result[j]``."""
        count = int(result.max()) + 1
        small, into = torch.broadcast_tensors(self.index, result)
        groups = int(self.size.numel() if self.group is None else self.group.max() + 1)
        labels = _components(groups + count, small.reshape(-1), into.reshape(-1) + groups)
        own = torch.arange(groups) if self.group is None else self.group
        return replace(self, moved_to=labels[groups:], group=labels[:groups][own])


def _components(n: int, first: Tensor, second: Tensor) -> Tensor:
    """Return the number of each node's connected component; ``n`` nodes, edges from ``first[i]`` to ``second[i]``."""
    least = torch.arange(n)
    while True:
        before = least
        ends = least[torch.cat([first, second])]
        lower = least[first].minimum(least[second]).repeat(2)
        least = least.scatter_reduce(0, ends, lower, "amin")
        least = least[least]  # each round merges whole components, so a long chain needs few rounds
        if torch.equal(least, before):
            return ((least == torch.arange(n)).cumsum(0) - 1)[least]


@dataclass(frozen=True)
class ParameterValue:
    """A tensor computed only from parameters: a parameter, a part of one, or a combination.

    Attributes:
        shape: of the tensor.
        parts: one entry per parameter it depends on, and per way of using it; empty if none of these parameters
            has gradients, because then all tasks read the tensor and no task changes it.
    """

    shape: torch.Size
    parts: tuple[Dependence, ...]

    @property
    def names(self) -> list[str]:
        """Return the sorted names of the parameters that the tensor depends on."""
        return sorted({part.name for part in self.parts})

    @property
    def owned(self) -> bool:
        """Return True if each task has its own copy of the whole tensor."""
        return all(part.owned for part in self.parts)

    @property
    def fixed(self) -> bool:
        """Return True if later tasks can't change the tensor: all its parameters are frozen, untrained or per task."""
        return all(part.owned or part.frozen for part in self.parts)

    def move_entries(self, move: Callable[[Tensor], Tensor]) -> ParameterValue:
        """Return the tensor after the operation ``move``, which only moves entries (a view, a slice)."""
        parts = tuple(replace(part, moved_to=move(part.index)) for part in self.parts)
        shape = parts[0].index.shape if parts else move(torch.zeros((), dtype=torch.long).expand(self.shape)).shape
        return ParameterValue(shape, parts)

    def combine_entries(self, result: Tensor, shape: tuple[int, ...]) -> ParameterValue:
        """Return the traced result of a reduction of this tensor, such as a sum or a norm, with a new ``shape``.

        ``result``: number of the new entry to which each entry contributes, from 0; broadcasts.
        """
        parts = tuple(part.combine_entries(result) for part in self.parts)
        return ParameterValue(torch.Size(shape), parts).move_entries(lambda place: place.reshape(shape))


def combine(shape: torch.Size, operands: list[ParameterValue]) -> ParameterValue:
    """Return the parameter dependences of an elementwise result: those of all ``operands`` at the same position."""
    parts: list[Dependence] = []
    for operand in operands:
        for part in operand.parts:
            new = replace(part, moved_to=part.index.expand(shape))
            if not any(_is_same_dependence(new, known) for known in parts):
                parts.append(new)
    return ParameterValue(shape, tuple(parts))


def _is_same_dependence(first: Dependence, second: Dependence) -> bool:
    if first.name != second.name or (first.group is None) != (second.group is None):
        return False
    groups = first.group is None or torch.equal(first.group, second.group)  # type: ignore[arg-type]
    return groups and torch.equal(first.index, second.index)


def filled(ids: Tensor) -> Tensor:
    """Return ``ids`` with zero padding (``NOTHING``) marked as nonzero (``ALWAYS``), e.g. after adding a constant."""
    small = compact(ids)
    empty = small == NOTHING
    return torch.where(empty, ALWAYS, small).expand(ids.shape) if bool(empty.any()) else ids


def always_in_use(like: Tensor) -> Value:
    """Return a :class:`Value` (traced tensor) in the shape of ``like`` that no mask affects."""
    return Value(torch.full((), ALWAYS).expand(like.shape))


def leaves(tree: Any) -> list[Any]:
    """Return all leaves of nested containers, in the order of the containers."""
    found: list[Any] = []
    map_leaves(tree, found.append)
    return found


map_leaves: Any = fx.node.map_aggregate
"""Function ``(tree, function)`` that returns a copy of nested containers with ``function`` applied to every leaf."""
