"""Lossless sparse entries of a tensor: positions, and values before a task changed them.

The values are stored directly (:class:`SparseValues`) or as a coded update (:class:`SparseUpdates`). Both restore the
same bits.

A task with coded updates is *committed* to them: its entries are set to ``before + Δ̂``, so the model, not the
unlearning, contains the rounding error. Undoing subtracts ``Δ̂`` in float64. If ``before`` has lower bits than
``before + Δ̂`` can represent, the result is off by some units in the last place; this number, mostly 0, is stored too.
Undoing starts at the task's final values, so any other change of these entries must be recorded as a task.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import as_integers, same_bits

LEVELS = 127
"""Limit of int8 codes, and of corrections in units in the last place."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
KEPT = -128
"""Marks an entry whose old value is stored directly instead of as a correction."""


class _Chosen:
    """Base class for chosen entries of a tensor. Subclasses add data per entry. All tensor attributes are saved."""

    chosen: Tensor
    """Positions as packed bits, or these compressed by zlib (:func:`pack`)."""
    shape: tuple[int, ...]

    @property
    def where(self) -> Tensor:
        """Return a bool tensor of the tensor's shape, True at the chosen entries."""
        return unpack(self.chosen, prod(self.shape)).reshape(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the total size of the stored tensors in bytes."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))


@dataclass(frozen=True)
class SparseValues(_Chosen):
    """Chosen entries of a tensor with their old values, stored directly.

    Weights have few signs and exponents but random digits: zlib shrinks their highest bytes to a third, and cannot
    shrink the lower ones.
    """

    chosen: Tensor
    high: Tensor
    low: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, where: Tensor) -> SparseValues:
        """Return the entries of ``tensor``, with their values, where the bool tensor ``where`` is True."""
        return cls._made(pack(where), tensor.detach().reshape(-1)[where.reshape(-1)].cpu(), tuple(tensor.shape))

    @classmethod
    def _made(cls, chosen: Tensor, values: Tensor, shape: tuple[int, ...]) -> SparseValues:
        planes = values.contiguous().view(torch.uint8).reshape(len(values), values.element_size())
        return cls(chosen, shrink(planes[:, -1].numpy(), repeats=False), planes[:, :-1].clone(), values.dtype, shape)

    @property
    def values(self) -> Tensor:
        """Return the values of the chosen entries, ``(k,)``, in the order of the flat tensor."""
        planes = np.empty((len(self.low), self.low.shape[1] + 1), dtype=np.uint8)
        for byte, plane in enumerate(self.low.numpy().T):  # one by one: numpy copies triples three times as slowly
            planes[:, byte] = plane
        planes[:, -1] = expand(self.high, len(self.low))
        return torch.from_numpy(planes.reshape(-1)).view(self.dtype)

    def before(self, written: Tensor) -> Tensor:
        """Return the stored values before the task, ``(k,)``. ``written``, the values after the task, is not used."""
        return self.values

    def rebased(self, before: Tensor, written: Tensor) -> SparseValues:
        """Return a copy that restores the values ``before`` ``(k,)`` from the values ``written`` ``(k,)``."""
        return self._made(self.chosen, before, self.shape)

    def extended(self, index: Tensor, values: Tensor) -> SparseValues:
        """Return a copy that also restores ``values`` ``(m,)`` at the entries with flat ``index`` ``(m,)``."""
        where = self.where.reshape(-1)
        before = positions(where).numpy()
        where[index] = True
        now = positions(where).numpy()  # if entries are few, searching this index is cheaper than dense values
        result = torch.zeros(len(now), dtype=self.dtype)
        for there, held in ((before, self.values), (index.numpy(), values)):
            put(result, torch.from_numpy(np.searchsorted(now, there)), held)
        return self._made(pack(where), result, self.shape)

    def restricted(self, keep: Tensor) -> SparseValues:
        """Return a copy with only the entries where ``keep`` (bool ``(n,)``) is True."""
        where = self.where.reshape(-1)
        return self._made(pack(where & keep), self.values[keep[where]], self.shape)


@dataclass(frozen=True)
class SparseUpdates(_Chosen):
    """Chosen entries of a tensor with a task's updates of the entries, stored in a lower precision."""

    chosen: Tensor
    codes: Tensor
    scales: Tensor
    steps: Tensor
    values: Tensor
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the tensor itself, not of the stored codes (rounded updates)."""
        return self.values.dtype

    def before(self, written: Tensor) -> Tensor:
        """Return the exact values before the task, ``(k,)``: ``written`` minus the coded update, plus a correction."""
        steps = self._steps
        old = (as_integers(self._subtracted(written)) + steps).view(self.dtype)
        old[steps == KEPT] = self.values
        return old

    def rebased(self, before: Tensor, written: Tensor) -> SparseUpdates:
        """Return a copy with the same codes, corrected to restore ``before`` ``(k,)`` from ``written`` ``(k,)``."""
        missed = as_integers(before) - as_integers(self._subtracted(written))
        kept = (missed > LEVELS) | (missed < -LEVELS)
        steps = torch.where(kept, KEPT, missed).to(torch.int8)
        return SparseUpdates(self.chosen, self.codes, self.scales, _stored(steps), before[kept], self.shape)

    def extended(self, index: Tensor, values: Tensor) -> SparseUpdates:
        """Return a copy that also restores ``values`` ``(m,)``, stored directly, at flat ``index`` ``(m,)``."""
        n, where = prod(self.shape), self.where.reshape(-1)
        codes, steps = torch.zeros(n, dtype=self.codes.dtype), torch.zeros(n, dtype=torch.int8)
        old = torch.zeros(n, dtype=self.dtype)
        codes[where], steps[where] = self.codes, self._steps
        old[steps == KEPT] = self.values
        where[index], steps[index], old[index] = True, KEPT, values
        kept = old[steps == KEPT]
        return SparseUpdates(pack(where), codes[where], self.scales, _stored(steps[where]), kept, self.shape)

    def restricted(self, keep: Tensor) -> SparseUpdates:
        """Return a copy with only the entries where ``keep``, bool ``(n,)``, is True."""
        where, steps = self.where.reshape(-1), self._steps
        stays = keep[where]
        values = self.values[stays[steps == KEPT]]
        codes = self.codes[stays]
        return SparseUpdates(pack(where & keep), codes, self.scales, _stored(steps[stays]), values, self.shape)

    @property
    def _steps(self) -> Tensor:
        return torch.from_numpy(expand(self.steps, len(self.codes)).copy()).view(torch.int8)

    def _subtracted(self, written: Tensor) -> Tensor:
        index = self.where.reshape(-1).nonzero()[:, 0]
        return (written.double() - decode(self.codes, self.scales, index, self.shape)).to(self.dtype)


SparseEntries = SparseValues | SparseUpdates
"""Chosen entries of a tensor with their values before a task, in either form."""


def _stored(steps: Tensor) -> Tensor:
    return shrink(steps.view(torch.uint8).numpy())


def coded(before: Tensor, after: Tensor, dtype: torch.dtype) -> tuple[Tensor, SparseUpdates]:
    """Encode the update ``after - before``; return the values after the rounded update, and the coded entries."""
    shape, n = tuple(before.shape), before.numel()
    old, new = before.reshape(-1), after.reshape(-1)
    delta = new.double() - old.double()
    everywhere = torch.arange(n)
    codes, scales = encode(delta, shape, dtype)
    update = decode(codes, scales, everywhere, shape)
    held = update.isfinite() & delta.isfinite()
    codes = torch.where(held, codes, torch.zeros_like(codes))
    committed = torch.where(held, (old.double() + update).to(old.dtype), new)
    committed = torch.where(same_bits(old, new), old, committed)
    moved = ~same_bits(old, committed)
    updates = SparseUpdates(pack(moved), codes[moved], scales, _stored(codes[:0].to(torch.int8)), old[:0], shape)
    return committed.reshape(shape), updates.rebased(old[moved], committed[moved])


def encode(delta: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (codes ``(n,)`` of a flat float64 update, in ``dtype``; scales of int8 codes, one per row)."""
    if dtype is not torch.int8:
        return delta.to(dtype), torch.zeros(0, dtype=torch.bfloat16)
    rows = _rows(shape)
    finite = torch.where(delta.isfinite(), delta, 0.0).reshape(rows, -1)
    largest = finite.abs().amax(dim=1) if delta.numel() else torch.zeros(rows)
    scales = (largest / LEVELS).bfloat16()
    steps = finite / torch.where(scales > 0, scales, 1.0).double()[:, None]
    return steps.round().clamp(-LEVELS, LEVELS).to(torch.int8).reshape(-1), scales


def decode(codes: Tensor, scales: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the float64 updates of the entries at flat ``index`` from their codes and the tensor's scales."""
    if codes.dtype is not torch.int8:
        return codes.double()
    per_row = max(prod(shape) // _rows(shape), 1)
    return codes.double() * scales.double()[index // per_row]


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 and 0 not in shape else 1


def pack(where: Tensor) -> Tensor:
    """Return a bool tensor packed into bits, as uint8, compressed by zlib if the result is shorter.

    The changed entries of a task are mostly an outer product of units, so zlib compresses their equal rows well.
    """
    return shrink(np.packbits(where.detach().cpu().numpy().reshape(-1)))


def unpack(bits: Tensor, n: int) -> Tensor:
    """Return the flat bool tensor ``(n,)`` that :func:`pack` packed."""
    return torch.from_numpy(np.unpackbits(expand(bits, -(-n // 8)), count=n).view(bool))


def chosen_by(entries: Sequence[SparseEntries]) -> np.ndarray:
    """Return the union, as packed bits, of the entries that several objects choose in one tensor."""
    return reduce(np.bitwise_or, (expand(of.chosen, -(-prod(of.shape) // 8)) for of in entries))


def united(choices: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensor name → union (logical or) of all bool tensors of this name in ``choices``."""
    result: dict[str, Tensor] = {}
    for choice in choices:
        for name, where in choice.items():
            result[name] = result[name] | where if name in result else where
    return result


def shrink(data: np.ndarray, *, repeats: bool = True) -> Tensor:
    """Return bytes as a uint8 tensor, compressed by zlib if that is shorter; ``repeats``: match repeated strings."""
    coder = zlib.compressobj(strategy=zlib.Z_DEFAULT_STRATEGY if repeats else zlib.Z_HUFFMAN_ONLY)
    coded = np.frombuffer(coder.compress(data.tobytes()) + coder.flush(), dtype=np.uint8)
    return torch.from_numpy((data if len(coded) >= len(data) else coded).copy())


def expand(shrunk: Tensor, n: int) -> np.ndarray:
    """Return the ``n`` bytes, read-only, from the result of :func:`shrink`. Data of length ``n`` is uncompressed."""
    data = shrunk.numpy()
    return data if len(data) == n else np.frombuffer(zlib.decompress(data.data, bufsize=n), dtype=np.uint8)


# Chosen entries of a dense tensor -----------------------------------------------------------------------------------
#
# On the CPU this uses numpy: torch uses several threads, which takes ten times as long on a busy machine.


def positions(where: Tensor) -> Tensor:
    """Return the flat index ``(k,)`` of the True entries of a bool tensor, on its device."""
    if where.device.type != "cpu":
        return where.reshape(-1).nonzero()[:, 0]
    return torch.from_numpy(where.numpy().reshape(-1).nonzero()[0])


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Return the values ``(k,)`` of a tensor's entries at flat ``index``."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type != "cpu":
        return flat.index_select(0, index)
    return torch.from_numpy(as_integers(flat).numpy().take(index.numpy())).view(flat.dtype)


def put(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    """Set a tensor's entries at flat ``index`` to ``values`` ``(k,)``, in place."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        dense = tensor.contiguous()
        put(dense, index, values)
        tensor.copy_(dense)
    elif tensor.device.type == "cpu":
        as_integers(tensor).reshape(-1).numpy()[index.numpy()] = as_integers(values).numpy()
    else:
        tensor.view(-1).index_copy_(0, index, values)


def copied(tensor: Tensor) -> Tensor:
    """Return a flat copy of a tensor on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    return torch.from_numpy(as_integers(tensor).numpy().reshape(-1).copy()).view(tensor.dtype)
