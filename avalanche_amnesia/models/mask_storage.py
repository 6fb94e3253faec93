"""Binary masks of many tasks in few bytes: packed bits, and an entropy code across tasks.

Masks of successive tasks resemble each other, as one task's scores start where the last one's ended. The code writes a
task's bit given the same weight's bits in the tasks before it: for each combination of those (a context) it states how
often a 1 follows, and codes the bits with an asymmetric numeral system at that probability. What it takes is within a
fraction of a percent of the conditional entropy ``Σ_contexts N·H(p)``, and it decodes exactly.

The coder is a range variant of asymmetric numeral systems (Duda, 2013) with 32-bit states, 16-bit probabilities and
many interleaved states ("lanes"), so that numpy works on a whole row of bits at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MAGIC = b"AMSK"
_HEADER = struct.Struct("<4sIQ")  # magic, tasks, entries
_TASK = struct.Struct("<qBII")  # label, tasks of context, lanes, words
_PROBABILITY_BITS = 16
_ONE = 1 << _PROBABILITY_BITS
_LOWEST_STATE = 1 << 16
_MOST_CONTEXT = 12
_BITS_PER_LANE = 4096

_Bits = NDArray[np.bool_]


def pack_bits(mask: Tensor) -> Tensor:
    """A bool mask ``(n,)`` as packed bytes, uint8 ``(⌈n/8⌉,)``, first entry in the highest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy())).to(mask.device)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The bool mask ``(n,)`` of what :func:`pack_bits` returned."""
    bits = np.unpackbits(packed.cpu().numpy(), count=n)
    return torch.from_numpy(bits.view(np.bool_)).to(packed.device)


def encode_masks(masks: Mapping[int, Tensor]) -> bytes:
    """The masks of several tasks, entropy-coded across tasks.

    Args:
        masks: task label → bool mask ``(n,)``, all of the same length, in the order in which the tasks were learned
            (neighbours resemble each other most).

    Returns:
        What :func:`decode_masks` takes back, exactly.

    Raises:
        ValueError: for masks that are not bool vectors of one length.
    """
    rows = [mask.detach().cpu().numpy() for mask in masks.values()]
    if any(row.dtype != np.bool_ or row.ndim != 1 or len(row) != len(rows[0]) for row in rows):
        shapes = [f"{mask.dtype} {tuple(mask.shape)}" for mask in masks.values()]
        raise ValueError(f"masks must be bool vectors of one length, got {shapes}")
    n = len(rows[0]) if rows else 0
    parts = [_HEADER.pack(_MAGIC, len(rows), n)]
    for position, (task, row) in enumerate(zip(masks, rows, strict=True)):
        parts += _encode_task(task, row, rows[:position])
    return b"".join(parts)


def decode_masks(data: bytes) -> dict[int, Tensor]:
    """The masks that :func:`encode_masks` wrote: task label → bool mask ``(n,)``.

    Raises:
        ValueError: for anything else.
    """
    try:
        magic, n_tasks, n = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("its first bytes are not those of encoded masks")
        offset = _HEADER.size
        rows: dict[int, _Bits] = {}
        for _ in range(n_tasks):
            task, row, offset = _decode_task(data, offset, n, list(rows.values()))
            rows[task] = row
        if offset != len(data):
            raise ValueError(f"{len(data) - offset} bytes are left over")
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"these are no encoded masks ({error}); give what encode_masks returned") from error
    return {task: torch.from_numpy(row) for task, row in rows.items()}


def _encode_task(task: int, row: _Bits, earlier: list[_Bits]) -> list[bytes]:
    depth = _best_depth(row, earlier)
    contexts = _contexts(earlier, depth, len(row))
    ones = _probabilities(row, contexts, depth)
    lanes = max(1, len(row) // _BITS_PER_LANE)
    states, words = _ans_encode(row, ones[contexts], lanes)
    header = _TASK.pack(task, depth, lanes, len(words))
    return [header, ones.astype("<u2").tobytes(), states.astype("<u4").tobytes(), words.astype("<u2").tobytes()]


def _decode_task(data: bytes, offset: int, n: int, earlier: list[_Bits]) -> tuple[int, _Bits, int]:
    task, depth, lanes, n_words = _TASK.unpack_from(data, offset)
    if depth > len(earlier):
        raise ValueError(f"task {task} refers to {depth} tasks before it, of which there are {len(earlier)}")
    offset += _TASK.size
    parts = []
    for dtype, count in (("<u2", 1 << depth), ("<u4", lanes), ("<u2", n_words)):
        parts.append(np.frombuffer(data, dtype, count, offset))
        offset += parts[-1].nbytes
    ones, states, words = parts
    of_entry = ones.astype(np.int64)[_contexts(earlier, depth, n)]
    return task, _ans_decode(of_entry, states.astype(np.int64), words.astype(np.int64)), offset


def _contexts(earlier: list[_Bits], depth: int, n: int) -> NDArray[np.int64]:
    """Per entry the bits of the last ``depth`` tasks as one number."""
    contexts = np.zeros(n, np.int64)
    for row in earlier[len(earlier) - depth :]:
        contexts = 2 * contexts + row
    return contexts


def _best_depth(row: _Bits, earlier: list[_Bits]) -> int:
    """How many earlier tasks to look back at: more tell more, but every context's probability takes two bytes."""
    costs = []
    for depth in range(min(len(earlier), _MOST_CONTEXT) + 1):
        contexts = _contexts(earlier, depth, len(row))
        totals = np.bincount(contexts, minlength=1 << depth).astype(float)
        ones = np.bincount(contexts, weights=row, minlength=1 << depth)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = sum(np.nan_to_num(-part * np.log2(part / totals)).sum() for part in (ones, totals - ones))
        costs.append(entropy + 16 * (1 << depth))
    return int(np.argmin(costs))


def _probabilities(row: _Bits, contexts: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
    """Per context the share of ones, in units of 2⁻¹⁶, never 0 or 1."""
    totals = np.bincount(contexts, minlength=1 << depth)
    ones = np.bincount(contexts, weights=row, minlength=1 << depth)
    return np.clip(np.rint(ones / np.maximum(totals, 1) * _ONE), 1, _ONE - 1).astype(np.int64)


def _ans_encode(bits: _Bits, ones: NDArray[np.int64], lanes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Final states ``(lanes,)`` and 16-bit words; ``ones`` is each bit's probability of being 1, in units of 2⁻¹⁶."""
    # A 1 takes the upper part of the 2¹⁶ slots, a 0 the lower one.
    sizes = np.where(bits, ones, _ONE - ones)
    starts = np.where(bits, _ONE - ones, 0)
    states = np.full(lanes, _LOWEST_STATE, np.int64)
    written: list[NDArray[np.int64]] = []
    for first in range((len(bits) - 1) // lanes * lanes, -1, -lanes):  # backwards: what comes last is read first
        size, start = sizes[first : first + lanes], starts[first : first + lanes]
        active = states[: len(size)]
        full = active >= size << 16
        written.append(active[full] & 0xFFFF)
        active = np.where(full, active >> 16, active)
        states[: len(size)] = (active // size << _PROBABILITY_BITS) + active % size + start
    return states, np.concatenate([*reversed(written), np.zeros(0, np.int64)])


def _ans_decode(ones: NDArray[np.int64], states: NDArray[np.int64], words: NDArray[np.int64]) -> _Bits:
    bits = np.empty(len(ones), np.bool_)
    lanes, position = len(states), 0
    for first in range(0, len(ones), lanes):
        one = ones[first : first + lanes]
        active = states[: len(one)]
        slot = active & (_ONE - 1)
        bit = slot >= _ONE - one
        active = np.where(bit, one * (active >> 16) + slot - (_ONE - one), (_ONE - one) * (active >> 16) + slot)
        empty = active < _LOWEST_STATE
        count = int(np.count_nonzero(empty))
        if position + count > len(words):
            raise ValueError("it ends too early")
        active[empty] = (active[empty] << 16) | words[position : position + count]
        position += count
        states[: len(one)] = active
        bits[first : first + lanes] = bit
    if position != len(words):
        raise ValueError(f"{len(words) - position} words are left over")
    return bits
