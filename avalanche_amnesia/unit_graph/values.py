"""Knowledge of each value while a backbone's graph is interpreted: from the input, from parameters, or constant.

A value is followed as an integer tensor of its own shape, whose entries name *sets* of units: an entry is zero
whenever all units of its set are masked. Reshaping, slicing, concatenating and so on are then nothing but the same
operation on that tensor, and a sum of values is the union of their sets, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

ALWAYS = 0
"""The set that no mask covers: the network's input, or an entry that may differ from zero under every mask."""
NOTHING = 1
"""The empty set: an entry that is zero under every mask (padding)."""

# Where channels and positions mix again and again (MLP-Mixer) sets multiply. Beyond these bounds an entry counts as
# always in use, which protects more than necessary.
_MOST_UNIONS = 2_000_000
_MOST_PAIRS = 100_000
_MOST_SETS = 400_000


class UnitSets:
    """Numbers for sets of units, which are numbered through all layers: a tensor of integers holds one per entry."""

    def __init__(self) -> None:
        self.n_units = 0
        self._sets: list[frozenset[int]] = [frozenset({-1}), frozenset()]  # -1 stands for "always"
        self._number = {members: number for number, members in enumerate(self._sets)}
        self._tables: list[tuple[Tensor, Tensor]] | None = None

    def __len__(self) -> int:
        return len(self._sets)

    def add_layer(self, units: int) -> Tensor:
        """Number a layer's units; the sets that hold one of them each, ``(units,)``."""
        first = self.n_units
        self.n_units += units
        return torch.tensor([self._of(frozenset({unit})) for unit in range(first, self.n_units)])

    def _of(self, members: frozenset[int]) -> int:
        if -1 in members:
            return ALWAYS
        number = self._number.get(members)
        if number is None:
            number = self._number[members] = len(self._sets)
            self._sets.append(members)
            self._tables = None
        return number

    def members(self, number: int) -> list[int]:
        """Units of a set, in order; none for ``ALWAYS`` and ``NOTHING``."""
        return sorted(self._sets[number] - {-1})

    def union(self, first: Tensor, second: Tensor) -> Tensor:
        """Entry by entry, as the tensors broadcast: the set of what is in either."""
        shape = torch.broadcast_shapes(first.shape, second.shape)
        first, second = torch.broadcast_tensors(first, second)
        a, b = compact_together(first, second)
        if torch.equal(a, b):
            return first
        apart = (a == NOTHING) | (b == NOTHING)
        if bool(apart.all()):
            return torch.where(a == NOTHING, b, a).expand(shape)
        pairs, place = torch.stack([a.reshape(-1), b.reshape(-1)]).unique(dim=1, return_inverse=True)
        if pairs.shape[1] > _MOST_PAIRS or len(self._sets) > _MOST_SETS:
            return torch.full((), ALWAYS).expand(shape)
        numbers = torch.tensor([self._of(self._sets[i] | self._sets[j]) for i, j in pairs.T.tolist()])
        return numbers[place].reshape(a.shape).expand(shape)

    def merge(self, groups: Tensor, ids: Tensor, n_groups: int) -> Tensor:
        """The union of the sets of every group, ``(n_groups,)``; ``NOTHING`` for a group without entries."""
        a, b = compact_together(*torch.broadcast_tensors(groups, ids))
        group, number = a.reshape(-1), b.reshape(-1)
        if bool((torch.bincount(group) > 1).any()):  # else there is nothing to sort out, which takes long
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
                known[key] = self._of(frozenset().union(*(self._sets[i] for i in key)))
            result[of_group] = known[key]
        return result

    def over(self, ids: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        """The union over some dimensions, as a sum over them would mix the entries."""
        dims = [dim % ids.dim() for dim in dims]
        small = compact(ids)
        shape = [1 if dim in dims else size for dim, size in enumerate(small.shape)]
        merged = self.merge(torch.arange(prod(shape)).reshape(shape), small, prod(shape)).reshape(shape)
        merged = merged.expand([1 if dim in dims else size for dim, size in enumerate(ids.shape)])
        return merged if keepdim else merged.squeeze(dims)

    # Masks to uses --------------------------------------------------------------------------------------------

    def table(self, numbers: Sequence[int]) -> Tensor:
        """Members of some sets, a column each: ``n_units`` stands for ``ALWAYS``, one more for ``NOTHING``."""
        ends = {ALWAYS: [self.n_units], NOTHING: [self.n_units + 1]}
        rows = [ends.get(number) or sorted(self._sets[number]) for number in numbers]
        width = max(map(len, rows))
        return torch.tensor([row + row[:1] * (width - len(row)) for row in rows]).T.contiguous()

    def tables(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Numbers and members of all sets, grouped by size: one table would be as wide as the largest set."""
        if self._tables is None or self._tables[0][0].device != device:
            by_size: dict[int, list[int]] = {}
            for number, members in enumerate(self._sets):
                by_size.setdefault((max(1, len(members)) - 1).bit_length(), []).append(number)
            groups = by_size.values()
            self._tables = [(torch.tensor(each).to(device), self.table(each).to(device)) for each in groups]
        return self._tables

    def use(self, masks: Tensor) -> Tensor:
        """Use of every set: the maximum over its units."""
        ends = masks.new_tensor([1.0, 0.0]).expand(*masks.shape[:-1], 2)
        known = torch.cat([masks, ends], -1)
        result = known.new_empty(*masks.shape[:-1], len(self._sets))
        for numbers, table in self.tables(masks.device):
            result[..., numbers] = known[..., table].amax(-2)
        return result


def compact(ids: Tensor) -> Tensor:
    """The tensor cut to size 1 wherever it is constant: it broadcasts to the same."""
    for dim in range(ids.dim()):
        if ids.shape[dim] > 1 and (ids.stride(dim) == 0 or bool((ids == ids.narrow(dim, 0, 1)).all())):
            ids = ids.narrow(dim, 0, 1)
    return ids


def compact_together(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape, cut to size 1 wherever both are constant, and of one shape again."""
    first, second = compact(first), compact(second)
    first, second = torch.broadcast_tensors(first, second)
    return first, second


# What is known of a value --------------------------------------------------------------------------------------------


class Masked(IntEnum):
    """Contents of masked entries; the larger is the weaker knowledge."""

    ZERO = 0
    """Exactly zero."""
    CONSTANT = 1
    """A number that no parameter of another task reaches: one half after a sigmoid, say."""
    DIRTY = 2
    """Whatever other tasks' parameters make of it: must be masked before anything reads it."""


@dataclass(frozen=True)
class Value:
    """A tensor computed from the input: the set of units behind every entry, and what masked entries hold.

    Every entry is a function of the input and of parameters that the task's mask protects, unless it is DIRTY.
    """

    ids: Tensor
    dtype: torch.dtype
    masked: Masked = Masked.ZERO

    def __post_init__(self) -> None:
        if self.masked is not Masked.ZERO:  # padding that is no longer zero is there under every mask
            object.__setattr__(self, "ids", filled(self.ids))

    @property
    def shape(self) -> torch.Size:
        """Shape for a batch of two."""
        return self.ids.shape

    def like(self, ids: Tensor | None = None, masked: Masked | None = None, dtype: torch.dtype | None = None) -> Value:
        """The same with other sets, other knowledge of the masked entries, or another type."""
        changed: dict[str, Any] = {"ids": ids, "masked": masked, "dtype": dtype}
        return replace(self, **{name: new for name, new in changed.items() if new is not None})

    @property
    def always(self) -> bool:
        """Tell whether no mask reaches any entry."""
        return bool((self.ids == ALWAYS).all())


@dataclass(frozen=True)
class Constant:
    """A tensor that depends on neither the input nor a parameter, with its content."""

    content: Tensor

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.content.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        return self.content.dtype


@dataclass(frozen=True)
class Dependence:
    """Entries of one parameter behind each entry of a tensor that is computed from it.

    The parameter's entries fall into groups; an entry of the tensor depends on all entries of one group.
    """

    name: str
    size: torch.Size
    moved_to: Tensor | None = None
    group: Tensor | None = None
    frozen: bool = False
    owned: bool = False

    @cached_property
    def place(self) -> Tensor:
        """Number of the parameter's entry, or of its group, behind each entry of the tensor."""
        # Most are used as they stand: then nobody asks for numbers, which would take more memory than the parameters.
        return torch.arange(self.size.numel()).reshape(self.size) if self.moved_to is None else self.moved_to

    @property
    def whole(self) -> bool:
        """Tell whether the tensor is the parameter as it stands."""
        if self.group is not None or self.moved_to is None:
            return self.group is None
        return self.moved_to.shape == self.size and _counts_up(self.moved_to)

    def mixed(self, result: Tensor) -> Dependence:
        """The same for a tensor whose entries each depend on several entries of this one."""
        count = int(result.max()) + 1
        small, into = torch.broadcast_tensors(self.place, result)
        groups = int(self.size.numel() if self.group is None else self.group.max() + 1)
        labels = _components(groups + count, small.reshape(-1), into.reshape(-1) + groups)
        own = torch.arange(groups) if self.group is None else self.group
        return replace(self, moved_to=labels[groups:], group=labels[:groups][own])


def _components(n: int, first: Tensor, second: Tensor) -> Tensor:
    """Number of the connected component of each of ``n`` nodes, where edges lead from ``first`` to ``second``."""
    least = torch.arange(n)
    while True:
        before = least
        ends = least[torch.cat([first, second])]
        lower = least[first].minimum(least[second]).repeat(2)
        least = least.scatter_reduce(0, ends, lower, "amin")
        least = least[least]  # each round joins whole components found so far: a long chain takes few
        if torch.equal(least, before):
            return ((least == torch.arange(n)).cumsum(0) - 1)[least]


def _counts_up(place: Tensor) -> bool:
    return place.is_contiguous() and torch.equal(place.reshape(-1), torch.arange(place.numel()))


@dataclass(frozen=True)
class ParameterValue:
    """A tensor computed only from parameters: a parameter, a part of one, or what several make together.

    Attributes:
        shape: of the tensor.
        dtype: type of its entries.
        parts: what stands behind it, one entry per parameter and way in which it is used; none where no parameter
            behind it has gradients: every task reads such a tensor, and nobody writes it.
    """

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[Dependence, ...]

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return sorted({part.name for part in self.parts})

    @property
    def owned(self) -> bool:
        """Tell whether each task has a copy of all of it."""
        return all(part.owned for part in self.parts)

    @property
    def fixed(self) -> bool:
        """Tell whether no later task can move it: it is frozen, each task's own, or without gradients."""
        return all(part.owned or part.frozen for part in self.parts)

    def moved(self, move: Callable[[Tensor], Tensor]) -> ParameterValue:
        """The result of an operation that moves entries."""
        parts = tuple(replace(part, moved_to=move(part.place)) for part in self.parts)
        shape = parts[0].place.shape if parts else move(torch.zeros((), dtype=torch.long).expand(self.shape)).shape
        return ParameterValue(shape, self.dtype, parts)

    def mixed(self, result: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> ParameterValue:
        """The result of an operation that mixes entries.

        Args:
            result: number of the new entry that each entry goes into, from 0; broadcasts.
            shape: of the new entries.
            dtype: of the result.
        """
        parts = tuple(part.mixed(result) for part in self.parts)
        return ParameterValue(torch.Size(shape), dtype, parts).moved(lambda place: place.reshape(shape))


def together(shape: torch.Size, dtype: torch.dtype, operands: list[ParameterValue]) -> ParameterValue:
    """Entry by entry, as the operands broadcast: what is computed from all of them."""
    parts: list[Dependence] = []
    for operand in operands:
        for part in operand.parts:
            new = replace(part, moved_to=part.place.expand(shape))
            if not any(_same(new, known) for known in parts):
                parts.append(new)
    return ParameterValue(shape, dtype, tuple(parts))


def _same(first: Dependence, second: Dependence) -> bool:
    if first.name != second.name or (first.group is None) != (second.group is None):
        return False
    groups = first.group is None or torch.equal(first.group, second.group)  # type: ignore[arg-type]
    return groups and torch.equal(first.place, second.place)


def filled(ids: Tensor) -> Tensor:
    """The sets of entries that are not kept zero where nothing stands behind them: there they are always in use."""
    small = compact(ids)
    empty = small == NOTHING
    return torch.where(empty, ALWAYS, small).expand(ids.shape) if bool(empty.any()) else ids


def always_in_use(shape: Any, dtype: torch.dtype) -> Value:
    """A value that no mask reaches."""
    return Value(torch.full((), ALWAYS).expand(shape), dtype)


def leaves(tree: Any) -> list[Any]:
    """Leaves, which are no containers, in order."""
    found: list[Any] = []
    map_leaves(tree, found.append)
    return found


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same containers around other leaves."""
    if isinstance(tree, list):
        return [map_leaves(part, function) for part in tree]
    if isinstance(tree, tuple):
        parts = [map_leaves(part, function) for part in tree]
        # `torch.max(x, 1).values`: what torch returns under names keeps them
        return type(tree)(parts) if type(tree).__module__ == "torch.return_types" else tuple(parts)
    if isinstance(tree, Mapping):
        return {name: map_leaves(part, function) for name, part in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_leaves(part, function) for part in (tree.start, tree.stop, tree.step)))
    return function(tree)
