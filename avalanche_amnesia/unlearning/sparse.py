"""Some entries of a tensor, losslessly: which they are, and their values before a task moved them.

Two ways to keep the values: as they are (:class:`SparseValues`), or as a coded update that leads back to them
(:class:`~avalanche_amnesia.unlearning.coded.SparseUpdates`). Both give the same bits back.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class SparseEntries(Protocol):
    """Chosen entries of a tensor and what they held before a task."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    @property
    def where(self) -> Tensor:
        """Bool tensor of the tensor's shape."""

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """The stored tensors by name; all that is needed beside the shape."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""

    @property
    def follows_value(self) -> bool:
        """Whether the way back starts at the value that the task left."""

    def before(self, written: Tensor) -> Tensor:
        """Values before the task ``(k,)``, from those that it left ``(k,)``."""

    def rebased(self, before: Tensor, written: Tensor) -> SparseEntries:
        """The same update on other ground: from ``before`` ``(k,)`` to ``written`` ``(k,)``."""

    def extended(self, index: Tensor, values: Tensor) -> SparseEntries:
        """With the entries at flat ``index`` ``(m,)`` leading back to ``values`` ``(m,)``."""

    def restricted(self, keep: Tensor) -> SparseEntries:
        """Those of the entries at which ``keep`` (bool ``(n,)``) is True."""


@dataclass(frozen=True)
class SparseValues:
    """Values of chosen entries of a tensor.

    Attributes:
        chosen: uint8; packed bits, one per entry of the flattened tensor, or their zlib where that is shorter.
        values: of the chosen entries in order, ``(k,)``.
        shape: of the tensor.
    """

    chosen: Tensor
    values: Tensor
    shape: tuple[int, ...]
    follows_value = False

    @classmethod
    def of(cls, tensor: Tensor, where: Tensor) -> SparseValues:
        """The entries of ``tensor`` at which the bool tensor ``where`` is True."""
        return cls(pack(where), tensor.detach().reshape(-1)[where.reshape(-1)].cpu().clone(), tuple(tensor.shape))

    @property
    def where(self) -> Tensor:
        """Bool tensor of the tensor's shape."""
        return unpack(self.chosen, size(self.shape)).reshape(self.shape)

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """Positions and values."""
        return {"chosen": self.chosen, "values": self.values}

    @property
    def nbytes(self) -> int:
        """Bytes of positions and values."""
        return self.chosen.nbytes + self.values.nbytes

    def before(self, written: Tensor) -> Tensor:
        """The values, whatever the task left."""
        return self.values

    def rebased(self, before: Tensor, written: Tensor) -> SparseValues:
        """The same entries, with other values."""
        return SparseValues(self.chosen, before, self.shape)

    def extended(self, index: Tensor, values: Tensor) -> SparseValues:
        """With further entries, or other values at some of these."""
        where, old = self.where.reshape(-1), torch.zeros(size(self.shape), dtype=self.values.dtype)
        old[where] = self.values
        where[index], old[index] = True, values
        return SparseValues(pack(where), old[where], self.shape)

    def restricted(self, keep: Tensor) -> SparseValues:
        """Some of the entries."""
        where = self.where.reshape(-1)
        return SparseValues(pack(where & keep), self.values[keep[where]].clone(), self.shape)


def pack(where: Tensor) -> Tensor:
    """A bool tensor as packed bits, or as their zlib where that is shorter (uint8).

    What a task moves is mostly an outer product of units: equal rows, of which zlib leaves next to nothing.
    """
    bits = np.packbits(where.detach().cpu().numpy().reshape(-1))
    coded = np.frombuffer(zlib.compress(bits.tobytes(), 9), dtype=np.uint8)
    return torch.from_numpy(bits if len(coded) >= len(bits) else coded.copy())


def unpack(bits: Tensor, n: int) -> Tensor:
    """The ``n`` bools that :func:`pack` packed, flat."""
    packed = bits.numpy()
    if len(packed) < -(-n // 8):
        packed = np.frombuffer(zlib.decompress(packed.tobytes()), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(packed, count=n).astype(bool))


def size(shape: tuple[int, ...]) -> int:
    """Entries of a tensor of this shape."""
    return int(np.prod(shape, dtype=np.int64))
