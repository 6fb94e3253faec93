"""Shares: a fixed random partition of every tensor's entries over slots, of which a task owns one.

The partition follows from (seed, tensor name) and takes no memory: it is made again whenever it is needed.
"""

from dataclasses import astuple, dataclass
from functools import lru_cache
from math import prod
from typing import Self

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.seeding import derive_seed

_PERMUTATIONS = 32
"""Permutations of a row's entries that are drawn for a tensor; each row takes one of them, turned by a number."""


@dataclass(frozen=True)
class Share:
    """Entries of every tensor that a task owns, and the tasks whose entries it reads beside its own.

    Attributes:
        seed: of the partition.
        slots: disjoint parts that every tensor is cut into.
        slot: the one that the task owns, from 0.
        reads: tasks that may never be unlearned, whose entries it reads and never changes.
    """

    seed: int
    slots: int
    slot: int
    reads: tuple[int, ...] = ()

    def encoded(self) -> Tensor:
        """The share as numbers, int64 ``(3 + tasks read,)``."""
        *numbers, reads = astuple(self)
        return torch.tensor([*numbers, *reads], dtype=torch.int64)

    @classmethod
    def decoded(cls, numbers: Tensor) -> Self:
        """The share that :meth:`encoded` wrote.

        Raises:
            ValueError: for numbers that are none.
        """
        found = numbers.tolist() if numbers.dtype == torch.int64 and numbers.dim() == 1 else []
        if len(found) < 3 or not 0 <= found[2] < found[1]:
            raise ValueError(f"{found} is no share: seed, slots, slot, tasks that are read")
        return cls(found[0], found[1], found[2], tuple(found[3:]))

    def overlaps(self, other: Self) -> bool:
        """Tell whether an entry may lie in both."""
        return (self.seed, self.slots) != (other.seed, other.slots) or self.slot == other.slot

    def deals(self, shape: torch.Size) -> bool:
        """Tell whether a tensor is dealt to the slots; each task has a copy of its own of any other one.

        One is not that has a single row (biases, norms, a token, an embedding of positions), or rows with fewer entries
        than there are slots, in which outputs would have no input left: such tensors are small.
        """
        return len(shape) > 1 and shape[0] > 1 and prod(shape[1:]) >= self.slots

    def owned(self, name: str, shape: torch.Size) -> Tensor:
        """Entries of a tensor that is dealt, bool of its shape: of each row ``n_in / slots``, rounded up or down."""
        codes, rows, turns = _partition(self.seed, name, shape[0], prod(shape[1:]), self.slots)
        wanted = ((self.slot - turns) % self.slots).to(codes.dtype)
        return codes.index_select(0, rows).eq_(wanted[:, None]).view(torch.bool).reshape(shape)


@lru_cache(maxsize=1024)  # small: of a matrix a few rows
def _partition(seed: int, name: str, n_rows: int, n_in: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot of every entry in some permutations of a row; which of them each row takes, and turned by what."""
    # RandomState, whose stream is frozen for good: a state that was saved is read by other versions too.
    random = np.random.RandomState(derive_seed(seed, "shares", name) % 2**32)
    ranks = np.stack([random.permutation(n_in) for _ in range(min(_PERMUTATIONS, n_rows))])
    rows, turns = random.randint(len(ranks), size=n_rows), random.randint(slots, size=n_rows)
    kind = torch.uint8 if slots <= 256 else torch.int32
    return torch.from_numpy(ranks % slots).to(kind), torch.from_numpy(rows), torch.from_numpy(turns)
