"""Sets of units behind the entries of the values that flow through a backbone.

A value is followed as an integer tensor of its own shape, whose entries name *sets* of units: an entry is zero
whenever all units of its set are masked. Reshaping, slicing, concatenating and so on are then nothing but the same
operation on that tensor, and a sum of values is the union of their sets, entry by entry.
"""

from collections.abc import Sequence

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
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)], 1).unique(dim=0)
        group, number = pairs[:, 0], pairs[:, 1]
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
        dims = sorted({dim % ids.dim() for dim in dims})
        kept = [1 if dim in dims else size for dim, size in enumerate(ids.shape)]
        n_groups = 1
        for size in kept:
            n_groups *= size
        small = compact(ids)
        shape = [1 if dim in dims else size for dim, size in enumerate(small.shape)]
        count = int(torch.tensor(shape).prod())
        merged = self.merge(torch.arange(count).reshape(shape), small, count).reshape(shape).expand(kept)
        return merged if keepdim else merged.reshape([size for dim, size in enumerate(kept) if dim not in dims])

    # Masks to uses --------------------------------------------------------------------------------------------

    def tables(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Members of all sets, grouped by size: one table would be as wide as the largest set."""
        if self._tables is None or self._tables[0][0].device != device:
            ends = {ALWAYS: [self.n_units], NOTHING: [self.n_units + 1]}
            by_size: dict[int, list[int]] = {}
            for number, members in enumerate(self._sets):
                by_size.setdefault((max(1, len(members)) - 1).bit_length(), []).append(number)
            self._tables = []
            for numbers in by_size.values():
                rows = [ends.get(number) or sorted(self._sets[number]) for number in numbers]
                width = max(map(len, rows))
                table = torch.tensor([row + row[:1] * (width - len(row)) for row in rows]).T.contiguous()
                self._tables.append((torch.tensor(numbers).to(device), table.to(device)))
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
