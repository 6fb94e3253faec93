"""Lossless sparse entries of a tensor: their positions, and their values before a task moved them.

Two ways to keep the values: as they are (:class:`SparseValues`), or as a coded update that leads back to them
(:class:`~avalanche_amnesia.trajectory.coded.SparseUpdates`). Both give the same bits back.
"""

from __future__ import annotations

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import as_integers


class SparseEntries(ABC):
    """Chosen entries of a tensor and what they held before a task; attributes that are tensors are what is stored."""

    chosen: Tensor
    """Positions as packed bits, or their zlib (:func:`pack`)."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    follows_value: ClassVar[bool]
    """True where the way back starts at the value that the task left."""

    @property
    def where(self) -> Tensor:
        """Bool tensor of the tensor's shape."""
        return unpack(self.chosen, prod(self.shape)).reshape(self.shape)

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """The stored tensors by name; all that is needed beside shape and dtype."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(part.nbytes for part in self.parts.values())

    @abstractmethod
    def before(self, written: Tensor) -> Tensor:
        """Values before the task ``(k,)``, from those that it left ``(k,)``."""

    @abstractmethod
    def rebased(self, before: Tensor, written: Tensor) -> SparseEntries:
        """The same update from another starting value: from ``before`` ``(k,)`` to ``written`` ``(k,)``."""

    @abstractmethod
    def extended(self, index: Tensor, values: Tensor) -> SparseEntries:
        """The same with the entries at flat ``index`` ``(m,)`` leading back to ``values`` ``(m,)``."""

    @abstractmethod
    def restricted(self, keep: Tensor) -> SparseEntries:
        """The entries at which ``keep`` (bool ``(n,)``) is True."""


@dataclass(frozen=True)
class SparseValues(SparseEntries):
    """Values of chosen entries of a tensor.

    Weights that were drawn within bounds have few signs and exponents, and random digits: of their highest bytes zlib
    leaves a third, of the others all.
    """

    chosen: Tensor
    high: Tensor
    low: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    follows_value = False

    @classmethod
    def of(cls, tensor: Tensor, where: Tensor) -> SparseValues:
        """The entries of ``tensor`` at which the bool tensor ``where`` is True."""
        return cls._made(pack(where), tensor.detach().reshape(-1)[where.reshape(-1)].cpu(), tuple(tensor.shape))

    @classmethod
    def none(cls, like: Tensor) -> SparseValues:
        """No entry of a tensor of this shape and type."""
        return cls._made(_no_bits(like.numel()), torch.zeros(0, dtype=like.dtype), tuple(like.shape))

    @classmethod
    def _made(cls, chosen: Tensor, values: Tensor, shape: tuple[int, ...]) -> SparseValues:
        planes = values.contiguous().view(torch.uint8).reshape(len(values), values.element_size())
        if sys.byteorder == "big":
            planes = planes.flip(1)
        return cls(chosen, shrink(planes[:, -1].numpy(), repeats=False), planes[:, :-1].clone(), values.dtype, shape)

    @property
    def values(self) -> Tensor:
        """Values of the chosen entries in order, ``(k,)``."""
        planes = np.empty((len(self.low), self.low.shape[1] + 1), dtype=np.uint8)
        for byte, plane in enumerate(self.low.numpy().T):  # one by one: numpy copies triples three times as slowly
            planes[:, byte] = plane
        planes[:, -1] = expand(self.high, len(self.low))
        if sys.byteorder == "big":
            planes = np.ascontiguousarray(planes[:, ::-1])
        return torch.from_numpy(planes.reshape(-1)).view(self.dtype)

    def before(self, written: Tensor) -> Tensor:
        """The values, whatever the task left."""
        return self.values

    def rebased(self, before: Tensor, written: Tensor) -> SparseValues:
        """The same entries, with other values."""
        return self._made(self.chosen, before, self.shape)

    def extended(self, index: Tensor, values: Tensor) -> SparseValues:
        """The same with further entries, or other values at some of these."""
        where = self.where.reshape(-1)
        before = positions(where).numpy()
        where[index] = True
        now = positions(where).numpy()  # looked up in order: dense values would cost as much for a few as for all
        result = torch.zeros(len(now), dtype=self.dtype)
        for there, held in ((before, self.values), (index.numpy(), values)):
            put(result, torch.from_numpy(np.searchsorted(now, there)), held)
        return self._made(pack(where), result, self.shape)

    def restricted(self, keep: Tensor) -> SparseValues:
        """Some of the entries."""
        where = self.where.reshape(-1)
        return self._made(pack(where & keep), self.values[keep[where]], self.shape)


def pack(where: Tensor) -> Tensor:
    """A bool tensor as packed bits, or as their zlib where that is shorter (uint8).

    What a task moves is mostly an outer product of units: equal rows, of which zlib leaves next to nothing.
    """
    return shrink(np.packbits(where.detach().cpu().numpy().reshape(-1)))


@lru_cache(maxsize=256)
def _no_bits(n: int) -> Tensor:
    return shrink(np.zeros(-(-n // 8), dtype=np.uint8))


def unpack(bits: Tensor, n: int) -> Tensor:
    """The ``n`` bools that :func:`pack` packed, flat."""
    return torch.from_numpy(np.unpackbits(expand(bits, -(-n // 8)), count=n).view(bool))


def chosen_by(entries: Sequence[SparseEntries]) -> np.ndarray:
    """Packed bits of the entries of one tensor that any of some choices has."""
    return reduce(np.bitwise_or, (expand(of.chosen, -(-prod(of.shape) // 8)) for of in entries))


def shrink(data: np.ndarray, *, repeats: bool = True) -> Tensor:
    """Bytes, or their zlib where that is shorter (uint8)."""
    coder = zlib.compressobj(strategy=zlib.Z_DEFAULT_STRATEGY if repeats else zlib.Z_HUFFMAN_ONLY)
    coded = np.frombuffer(coder.compress(data.tobytes()) + coder.flush(), dtype=np.uint8)
    return torch.from_numpy((data if len(coded) >= len(data) else coded).copy())


def expand(shrunk: Tensor, n: int) -> np.ndarray:
    """The ``n`` bytes that :func:`shrink` was given, not to be written to; the length tells which form they have."""
    data = shrunk.numpy()
    return data if len(data) == n else np.frombuffer(zlib.decompress(data.data, bufsize=n), dtype=np.uint8)


# Chosen entries of a dense tensor -----------------------------------------------------------------------------------
#
# On the CPU by way of numpy: torch does such work in several threads, which wait for each other, and on a busy machine
# takes ten times as long.


def positions(where: Tensor) -> Tensor:
    """Flat index ``(k,)`` of the True entries of a bool tensor, on its device."""
    if where.device.type != "cpu":
        return where.reshape(-1).nonzero()[:, 0]
    return torch.from_numpy(where.numpy().reshape(-1).nonzero()[0])


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Values ``(k,)`` of the entries at flat ``index``."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type != "cpu":
        return flat.index_select(0, index)
    return torch.from_numpy(as_integers(flat).numpy().take(index.numpy())).view(flat.dtype)


def put(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    """Set the entries at flat ``index`` to ``values`` ``(k,)``, in place."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        dense = tensor.contiguous()
        put(dense, index, values)
        tensor.copy_(dense)
    elif tensor.device.type == "cpu":
        as_integers(tensor).reshape(-1).numpy()[index.numpy()] = as_integers(values).numpy()
    else:
        tensor.view(-1).index_copy_(0, index, values)


def chosen(tensor: Tensor, where: Tensor) -> Tensor:
    """Values ``(k,)`` of the entries at which a bool tensor of the same shape is True."""
    return take(tensor, positions(where))


def fill(tensor: Tensor, where: Tensor, values: Tensor) -> None:
    """Set the entries at which a bool tensor of the same shape is True to ``values`` ``(k,)``, in place."""
    put(tensor, positions(where), values)


def copied(tensor: Tensor) -> Tensor:
    """A flat copy on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    return torch.from_numpy(as_integers(tensor).numpy().reshape(-1).copy()).view(tensor.dtype)
