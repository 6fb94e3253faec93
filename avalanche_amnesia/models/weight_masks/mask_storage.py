"""Binary masks of many tasks in few bytes: packed bits, and an entropy code across tasks.

Masks of successive tasks resemble each other, as one task's scores start where the last one's ended. And the weights
themselves, without which no mask is of any use, tell about the masks: one that no task uses is small, as it was drawn.
The code writes a task's bit given the same weight's bits in the tasks before it and the class of the weight's
magnitude: for each combination of those (a context) it states how often a 1 follows, and codes the bits with an
asymmetric numeral system at that probability. What it takes is the conditional entropy ``Σ_contexts N·H(p)`` and about
.01 bit per entry, and it decodes exactly.

The coder is a range variant of asymmetric numeral systems (Duda, 2013) with 32-bit states, 12-bit probabilities and
many interleaved states ("lanes"), so that numpy works on a whole row of bits at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MAGIC = b"AMS2"
_HEADER = struct.Struct("<4sIQ")  # magic, tasks, entries
_TASK = struct.Struct("<qBBII")  # label, tasks and class bits of context, lanes, words
_PROBABILITY_BITS = 12
_ONE = 1 << _PROBABILITY_BITS
_LOWEST_STATE = 1 << 16
_FULL_BITS = 32 - _PROBABILITY_BITS
_MOST_CONTEXT = 12
_CLASS_BITS = 4
_BITS_PER_LANE = 4096

_Bits = NDArray[np.bool_]
_Integers = NDArray[np.int64]


def pack_bits(mask: Tensor) -> Tensor:
    """A bool mask ``(n,)`` as packed bytes, uint8 ``(⌈n/8⌉,)``, first entry in the highest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy())).to(mask.device)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The bool mask ``(n,)`` of what :func:`pack_bits` returned."""
    bits = np.unpackbits(packed.cpu().numpy(), count=n)
    return torch.from_numpy(bits.view(np.bool_)).to(packed.device)


def magnitude_classes(values: Tensor) -> Tensor:
    """Sort by magnitude into 16 classes of about one size: int64 ``(n,)``, 0 for the smallest; equals share a class.

    Nothing is rounded, so that the same values have the same classes on any machine.

    Args:
        values: float ``(n,)``, ``n`` ≥ 1.
    """
    magnitudes = values.detach().cpu().float().abs().numpy()
    ranks = [len(magnitudes) * step >> _CLASS_BITS for step in range(1, 1 << _CLASS_BITS)]
    edges = np.partition(magnitudes, ranks)[ranks]
    return torch.from_numpy(np.searchsorted(edges, magnitudes, side="right").astype(np.int64))


def encode_masks(masks: Mapping[int, Tensor], classes: Tensor | None = None) -> bytes:
    """The masks of several tasks, entropy-coded across tasks.

    Args:
        masks: task label → bool mask ``(n,)``, all of the same length, in the order in which the tasks were learned
            (neighbours resemble each other most).
        classes: what the decoder will know about each entry, int64 ``(n,)`` in 0..15 (:func:`magnitude_classes`);
            neighbouring classes are merged where fewer will do. By default nothing.

    Returns:
        What :func:`decode_masks` takes back, exactly, with the same classes.

    Raises:
        ValueError: for masks that are not bool vectors of one length, or classes of another length or range.
    """
    rows = [mask.detach().cpu().numpy() for mask in masks.values()]
    if any(row.dtype != np.bool_ or row.ndim != 1 or len(row) != len(rows[0]) for row in rows):
        shapes = [f"{mask.dtype} {tuple(mask.shape)}" for mask in masks.values()]
        raise ValueError(f"masks must be bool vectors of one length, got {shapes}")
    n = len(rows[0]) if rows else 0
    known = _known(classes, n)
    parts = [_HEADER.pack(_MAGIC, len(rows), n)]
    for position, (task, row) in enumerate(zip(masks, rows, strict=True)):
        parts += _encode_task(task, row, rows[:position], known)
    return b"".join(parts)


def decode_masks(data: bytes, classes: Tensor | None = None) -> dict[int, Tensor]:
    """The masks that :func:`encode_masks` wrote: task label → bool mask ``(n,)``.

    Args:
        data: what it returned.
        classes: those that it was given.

    Raises:
        ValueError: for anything else.
    """
    try:
        magic, n_tasks, n = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("its first bytes are not those of encoded masks")
        known = _known(classes, n)
        offset = _HEADER.size
        rows: dict[int, _Bits] = {}
        for _ in range(n_tasks):
            task, row, offset = _decode_task(data, offset, list(rows.values()), known)
            rows[task] = row
        if offset != len(data):
            raise ValueError(f"{len(data) - offset} bytes are left over")
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(
            f"these are no encoded masks, or not of these classes ({error}); give what encode_masks took and returned"
        ) from error
    return {task: torch.from_numpy(row) for task, row in rows.items()}


def _known(classes: Tensor | None, n: int) -> _Integers:
    if classes is None:
        return np.zeros(n, np.int64)
    known = classes.cpu().numpy()
    if known.dtype != np.int64 or known.shape != (n,) or (n and not 0 <= known.min() <= known.max() < 1 << _CLASS_BITS):
        kind = f"{classes.dtype} {tuple(classes.shape)}"
        raise ValueError(f"classes must be int64 ({n},) in 0..{(1 << _CLASS_BITS) - 1}, got {kind}")
    return known


def _encode_task(task: int, row: _Bits, earlier: list[_Bits], known: _Integers) -> list[bytes]:
    depth, class_bits, ones = _best_contexts(row, earlier, known)
    lanes = max(1, len(row) // _BITS_PER_LANE)
    states, words = _ans_encode(row, ones[_contexts(earlier, depth, known, class_bits)], lanes)
    header = _TASK.pack(task, depth, class_bits, lanes, len(words))
    return [header, ones.astype("<u2").tobytes(), states.astype("<u4").tobytes(), words.astype("<u2").tobytes()]


def _decode_task(data: bytes, offset: int, earlier: list[_Bits], known: _Integers) -> tuple[int, _Bits, int]:
    task, depth, class_bits, lanes, n_words = _TASK.unpack_from(data, offset)
    if depth > len(earlier) or class_bits > _CLASS_BITS:
        raise ValueError(
            f"task {task} refers to {depth} tasks before it, of {len(earlier)}, and {class_bits} class bits"
        )
    offset += _TASK.size
    parts = []
    for dtype, count in (("<u2", 1 << depth + class_bits), ("<u4", lanes), ("<u2", n_words)):
        parts.append(np.frombuffer(data, dtype, count, offset))
        offset += parts[-1].nbytes
    ones, states, words = parts
    of_entry = ones.astype(np.int64)[_contexts(earlier, depth, known, class_bits)]
    return task, _ans_decode(of_entry, states.astype(np.int64), words.astype(np.int64)), offset


def _contexts(earlier: list[_Bits], depth: int, known: _Integers, class_bits: int) -> _Integers:
    """Per entry the bits of the last ``depth`` tasks and the upper ``class_bits`` bits of its class as one number."""
    contexts = np.zeros(len(known), np.int64)
    for row in earlier[len(earlier) - depth :]:
        contexts = 2 * contexts + row
    return (contexts << class_bits) + (known >> _CLASS_BITS - class_bits)


def _best_contexts(row: _Bits, earlier: list[_Bits], known: _Integers) -> tuple[int, int, _Integers]:
    """How many earlier tasks and class bits to look at, and per context the share of ones in units of 2⁻¹².

    More of them tell more, but every context's share takes two bytes.
    """
    most = min(len(earlier), _MOST_CONTEXT)
    contexts = _contexts(earlier, most, known, _CLASS_BITS)
    # How often a 0 or a 1 follows, by context; fewer tasks or classes are sums over it.
    finest = np.stack([np.bincount(contexts[row == bit], minlength=1 << most + _CLASS_BITS) for bit in (False, True)])
    best: tuple[float, int, int, _Integers] | None = None
    for depth in range(most + 1):
        by_task = finest.reshape(2, -1, 1 << depth + _CLASS_BITS).sum(1)
        for class_bits in range(_CLASS_BITS + 1):
            counts = by_task.reshape(2, 1 << depth + class_bits, -1).sum(2)
            shares = counts / np.maximum(counts.sum(0), 1)
            bits = -(counts * np.log2(shares, out=np.zeros_like(shares), where=counts > 0)).sum()
            cost = float(bits) + 16 * counts.shape[1]
            if best is None or cost < best[0]:
                ones = np.clip(np.rint(shares[1] * _ONE), 1, _ONE - 1).astype(np.int64)  # never 0 or 1
                best = cost, depth, class_bits, ones
    assert best is not None
    return best[1:]


def _ans_encode(bits: _Bits, ones: _Integers, lanes: int) -> tuple[_Integers, _Integers]:
    """Final states ``(lanes,)`` and 16-bit words; ``ones`` is each bit's probability of being 1, in units of 2⁻¹²."""
    # A 1 takes the upper part of the 2¹² slots, a 0 the lower one.
    sizes = np.where(bits, ones, _ONE - ones)
    starts = np.where(bits, _ONE - ones, 0)
    states = np.full(lanes, _LOWEST_STATE, np.int64)
    written: list[_Integers] = []
    for first in range((len(bits) - 1) // lanes * lanes, -1, -lanes):  # backwards: what comes last is read first
        size, start = sizes[first : first + lanes], starts[first : first + lanes]
        active = states[: len(size)]
        full = active >= size << _FULL_BITS
        written.append(active[full] & 0xFFFF)
        active = np.where(full, active >> 16, active)
        states[: len(size)] = (active // size << _PROBABILITY_BITS) + active % size + start
    return states, np.concatenate([*reversed(written), np.zeros(0, np.int64)])


def _ans_decode(ones: _Integers, states: _Integers, words: _Integers) -> _Bits:
    bits = np.empty(len(ones), np.bool_)
    lanes, position = len(states), 0
    for first in range(0, len(ones), lanes):
        one = ones[first : first + lanes]
        active = states[: len(one)]
        slot = active & (_ONE - 1)
        bit = slot >= _ONE - one
        times = active >> _PROBABILITY_BITS
        active = np.where(bit, one * times + slot - (_ONE - one), (_ONE - one) * times + slot)
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
    if np.any(states != _LOWEST_STATE):
        raise ValueError("it does not end where it began")
    return bits
