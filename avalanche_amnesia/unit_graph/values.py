"""Knowledge of each value while a backbone's graph is interpreted: from the input, from parameters, or constant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.unit_graph.units import ALWAYS, NOTHING, compact


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
        return replace(
            self,
            ids=self.ids if ids is None else ids,
            masked=self.masked if masked is None else masked,
            dtype=self.dtype if dtype is None else dtype,
        )

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
    if isinstance(tree, (tuple, list)):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    if isinstance(tree, slice):
        return [leaf for part in (tree.start, tree.stop, tree.step) for leaf in leaves(part)]
    return [tree]


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
