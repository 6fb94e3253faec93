"""Sparse undo data of a tensor, without loss: positions of changed entries, and their values before a task.

The values are stored directly (:class:`SparseValues`) or as a coded update (:class:`SparseUpdates`). Both restore the
same bits.

A task with coded updates is *committed* to them: its entries are set to ``before + Δ̂``, so the model, not the
unlearning, contains the rounding error. Undoing subtracts ``Δ̂`` in float64. If ``before`` has lower bits than
``before + Δ̂`` can represent, the result is off by some units in the last place; this number, mostly 0, is stored too.
Undoing starts at the task's final values, so any other change of these entries must be recorded as a task.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import as_integers, same_bits

LEVELS = 127
"""Largest int8 code of an update, and largest correction in units in the last place."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
STORED_DIRECTLY = -128
"""Code of an entry whose old value is stored directly instead of as a correction."""


class _ChosenEntries:
    """Base class for the positions of a tensor's changed entries; subclasses add the old values or the updates."""

    chosen: Tensor
    """Positions of the entries, packed into bytes by :func:`pack`."""
    shape: tuple[int, ...]

    @property
    def bits(self) -> np.ndarray:
        """Return which entries of each row are chosen, as packed bits ``(rows, ⌈entries per row / 8⌉)``."""
        rows, data = _n_rows(self.shape), self.chosen.numpy()
        width = -(-prod(self.shape) // rows // 8)
        if len(data) == rows * width:
            return data.reshape(rows, width)
        data = np.frombuffer(zlib.decompress(data.data), dtype=np.uint8)
        return data[4 * rows :].reshape(-1, width)[data[: 4 * rows].view(np.uint32)]

    @property
    def where(self) -> Tensor:
        """Return a bool tensor of the tensor's shape, True at the chosen entries."""
        bits = self.bits
        return torch.from_numpy(np.unpackbits(bits, 1, prod(self.shape) // len(bits)).view(bool)).reshape(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the total size of the stored tensors in bytes."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))


@dataclass(frozen=True)
class SparseValues(_ChosenEntries):
    """The entries that a task changed in a tensor: positions and old values, with which the change can be undone.

    Weights have few signs and exponents but random digits: their highest bytes are coded (:func:`compress_bytes`), the
    lower ones cannot be shrunk.
    """

    chosen: Tensor
    high: Tensor
    low: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def select(cls, tensor: Tensor, where: Tensor) -> SparseValues:
        """Store the values of ``tensor`` at the entries where the bool tensor ``where`` is True."""
        return cls._from_values(pack(where), tensor.detach().reshape(-1)[where.reshape(-1)].cpu(), tuple(tensor.shape))

    @classmethod
    def _from_values(cls, chosen: Tensor, values: Tensor, shape: tuple[int, ...]) -> SparseValues:
        planes = values.contiguous().view(torch.uint8).reshape(len(values), values.element_size()).T
        return cls(chosen, compress_bytes(planes[-1].numpy()), planes[:-1].contiguous(), values.dtype, shape)

    @property
    def values(self) -> Tensor:
        """Return the stored old values of the entries, in order, ``(k,)``."""
        bytes_below, k = self.low.shape
        planes = np.empty((k, bytes_below + 1), dtype=np.uint8)
        for byte, plane in enumerate(self.low.numpy()):  # one by one: numpy copies triples three times as slowly
            planes[:, byte] = plane
        planes[:, -1] = decompress_bytes(self.high, k)
        return torch.from_numpy(planes.reshape(-1)).view(self.dtype)

    def old_values(self, written: Tensor) -> Tensor:
        """Return the stored values before the task, ``(k,)``. ``written``, the values after the task, is not used."""
        return self.values

    def rebase(self, before: Tensor, written: Tensor) -> SparseValues:
        """Return a copy with the old values ``before`` ``(k,)``; ``written`` (values after the task) is not used."""
        return self._from_values(self.chosen, before, self.shape)

    def extend(self, index: Tensor, values: Tensor) -> SparseValues:
        """Return a copy with more entries: old values ``values`` ``(m,)`` at the flat positions ``index`` ``(m,)``."""
        where, old = self.where, torch.zeros(self.shape, dtype=self.dtype)
        for there, held in ((where.reshape(-1), self.values), (index, values)):
            put(old, there, held)
        put(where, index, torch.tensor(True))
        return self.select(old, where)

    def restrict(self, keep: Tensor) -> SparseValues:
        """Return a copy with only the entries where ``keep`` (bool ``(n,)``) is True."""
        where = self.where.reshape(-1)
        return self._from_values(pack((where & keep).reshape(self.shape)), self.values[keep[where]], self.shape)


@dataclass(frozen=True)
class SparseUpdates(_ChosenEntries):
    """The entries that a task changed in a tensor: positions, and updates (differences) in a lower precision."""

    chosen: Tensor
    codes: Tensor
    scales: Tensor
    steps: Tensor
    values: Tensor
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the tensor that the task changed; its updates are stored in a lower precision."""
        return self.values.dtype

    def old_values(self, written: Tensor) -> Tensor:
        """Return the exact values before the task, ``(k,)``: ``written`` minus rounded update, plus a correction."""
        steps = self._corrections
        old = (as_integers(self._subtract_update(written)) + steps).view(self.dtype)
        old[steps == STORED_DIRECTLY] = self.values
        return old

    def rebase(self, before: Tensor, written: Tensor) -> SparseUpdates:
        """Return a copy with old values ``before`` for the new values ``written``, both ``(k,)``; the codes stay."""
        missed = as_integers(before) - as_integers(self._subtract_update(written))
        kept = (missed > LEVELS) | (missed < -LEVELS)
        steps = torch.where(kept, STORED_DIRECTLY, missed).to(torch.int8)
        return SparseUpdates(self.chosen, self.codes, self.scales, _compress(steps), before[kept], self.shape)

    def extend(self, index: Tensor, values: Tensor) -> SparseUpdates:
        """Return a copy with more entries: old values ``values`` ``(m,)``, not coded, at flat ``index`` ``(m,)``."""
        n, where = prod(self.shape), self.where.reshape(-1)
        codes, steps = torch.zeros(n, dtype=self.codes.dtype), torch.zeros(n, dtype=torch.int8)
        old = torch.zeros(n, dtype=self.dtype)
        codes[where], steps[where] = self.codes, self._corrections
        old[steps == STORED_DIRECTLY] = self.values
        where[index], steps[index], old[index] = True, STORED_DIRECTLY, values
        kept = old[steps == STORED_DIRECTLY]
        chosen = pack(where.reshape(self.shape))
        return SparseUpdates(chosen, codes[where], self.scales, _compress(steps[where]), kept, self.shape)

    def restrict(self, keep: Tensor) -> SparseUpdates:
        """Return a copy with only the entries where ``keep``, bool ``(n,)``, is True."""
        where, steps = self.where.reshape(-1), self._corrections
        stays = keep[where]
        values = self.values[stays[steps == STORED_DIRECTLY]]
        codes, chosen = self.codes[stays], pack((where & keep).reshape(self.shape))
        return SparseUpdates(chosen, codes, self.scales, _compress(steps[stays]), values, self.shape)

    @property
    def _corrections(self) -> Tensor:
        return _to_tensor(zlib.decompress(self.steps.numpy().data)).view(torch.int8)

    def _subtract_update(self, written: Tensor) -> Tensor:
        index = self.where.reshape(-1).nonzero()[:, 0]
        return (written.double() - decode(self.codes, self.scales, index, self.shape)).to(self.dtype)


SparseEntries = SparseValues | SparseUpdates
"""The entries that a task changed in a tensor, with their old values or with coded updates."""


def _compress(steps: Tensor) -> Tensor:
    return _to_tensor(zlib.compress(steps.numpy().tobytes()))


def _to_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def encode_update(before: Tensor, after: Tensor, dtype: torch.dtype) -> tuple[Tensor, SparseUpdates]:
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
    chosen = pack(moved.reshape(shape))
    updates = SparseUpdates(chosen, codes[moved], scales, _compress(codes[:0].to(torch.int8)), old[:0], shape)
    return committed.reshape(shape), updates.rebase(old[moved], committed[moved])


def encode(delta: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert a flat float64 update to codes of ``dtype``; return the codes ``(n,)`` and, for int8, a scale per row."""
    if dtype is not torch.int8:
        return delta.to(dtype), torch.zeros(0, dtype=torch.bfloat16)
    rows = _n_rows(shape)
    finite = torch.where(delta.isfinite(), delta, 0.0).reshape(rows, -1)
    largest = finite.abs().amax(dim=1) if delta.numel() else torch.zeros(rows)
    scales = (largest / LEVELS).bfloat16()
    steps = finite / torch.where(scales > 0, scales, 1.0).double()[:, None]
    return steps.round().clamp(-LEVELS, LEVELS).to(torch.int8).reshape(-1), scales


def decode(codes: Tensor, scales: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the float64 updates of the entries at flat ``index`` from their codes and the tensor's scales."""
    if codes.dtype is not torch.int8:
        return codes.double()
    per_row = max(prod(shape) // _n_rows(shape), 1)
    return codes.double() * scales.double()[index // per_row]


def _n_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 and 0 not in shape else 1


def pack(where: Tensor) -> Tensor:
    """Return a bool tensor packed into bits, as uint8: equal rows only once and compressed by zlib, if that is shorter.

    The changed entries of a task are mostly an outer product of units, so that few rows differ.
    """
    rows = np.packbits(where.detach().cpu().numpy().reshape(_n_rows(tuple(where.shape)), -1), axis=1)
    different: dict[bytes, int] = {}
    index = np.array([different.setdefault(row.tobytes(), len(different)) for row in rows], dtype=np.uint32)
    coded = zlib.compress(index.tobytes() + b"".join(different))
    return _to_tensor(rows.tobytes() if len(coded) >= rows.size else coded)


def union_of(choices: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a dict of tensor name to the union (logical or) of all bool tensors of this name in ``choices``."""
    result: dict[str, Tensor] = {}
    for choice in choices:
        for name, where in choice.items():
            result[name] = result[name] | where if name in result else where
    return result


def compress_bytes(data: np.ndarray) -> Tensor:
    """Compress bytes ``(k,)`` to 4 bits for each of the 15 most frequent values; return a copy if not shorter."""
    table = np.argsort(-np.bincount(data, minlength=256), kind="stable")[:16].astype(np.uint8)
    code_of = np.full(256, 15, dtype=np.uint8)
    code_of[table] = np.arange(16)
    codes = code_of[np.append(data, table[: len(data) % 2])]  # an even number
    coded = np.concatenate([table, codes[::2] << 4 | codes[1::2], data[code_of[data] == 15]])
    return torch.from_numpy(data.copy() if len(coded) >= len(data) else coded)


def decompress_bytes(coded: Tensor, k: int) -> np.ndarray:
    """Return the ``k`` bytes given to :func:`compress_bytes`; four times as fast as zlib."""
    if len(coded) == k:
        return coded.numpy()
    table, codes, rare = np.split(coded.numpy(), [16, 16 + -(-k // 2)])
    pairs = np.stack([table.repeat(16), np.tile(table, 16)], 1).view(np.uint16)[:, 0]
    data: np.ndarray = pairs.take(codes).view(np.uint8)[:k]
    data[data == table[15]] = rare
    return data


# Chosen entries of a dense tensor -----------------------------------------------------------------------------------
#
# On the CPU this uses numpy: torch uses several threads, which takes ten times as long on a busy machine.


def positions(where: Tensor) -> Tensor:
    """Return the flat index ``(k,)`` of the True entries of a bool tensor, on its device."""
    if where.device.type != "cpu":
        return where.reshape(-1).nonzero()[:, 0]
    return torch.from_numpy(where.numpy().reshape(-1).nonzero()[0])


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Return a tensor's values ``(k,)`` at ``index``: flat positions ``(k,)``, or a bool tensor ``(n,)``."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type != "cpu":
        return flat[index]
    return torch.from_numpy(as_integers(flat).numpy()[index.numpy()]).view(flat.dtype)


def put(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    """Set a tensor's entries at ``index`` (as in :func:`take`) to ``values`` ``(k,)``, in place."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        dense = tensor.contiguous()
        put(dense, index, values)
        tensor.copy_(dense)
    elif tensor.device.type == "cpu":
        as_integers(tensor).reshape(-1).numpy()[index.numpy()] = as_integers(values).numpy()
        torch.autograd.graph.increment_version(tensor)  # torch does not count writes by numpy
    else:
        tensor.view(-1)[index] = values
