"""Compression of the binary masks of many tasks, and of a trained task's weight scores.

Masks of successive tasks are similar. So a weight's bits in eight tasks form one byte, and these bytes are
Huffman-coded. Each further group of eight tasks is stored as its difference (XOR) to the mask before it.

Of the scores only the ranking of ``|score|`` matters, because the score and its straight-through gradient change sign
together. The task's mask, which the model stores anyway, is the first bit: chosen or not. Each further bit halves the
range of ranks within both groups. Decoded sizes come from a table of quantiles, and a fixed random draw orders the
scores of equal code.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.seeding import derive_seed

_GROUP = 8
_QUANTILES = 65
"""Number of quantiles stored per layer for the chosen scores, and for the rest."""


def encode_masks(masks: Sequence[Tensor]) -> bytes:
    """Return the bool masks ``(n,)`` of several tasks, in training order, compressed together into bytes."""
    rows = [mask.cpu().numpy() for mask in masks]
    # Huffman code only: searching for repeated strings finds none, and would enlarge the result.
    coder = zlib.compressobj(level=9, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    code = b""
    for first in range(0, len(rows), _GROUP):
        group = np.stack(rows[first : first + _GROUP], axis=1)
        width = 1 << (group.shape[1] - 1).bit_length()  # a power of two, so that no weight spans two bytes
        bits = np.zeros((len(group), width), np.bool_)
        bits[:, : group.shape[1]] = group ^ rows[first - 1][:, None] if first else group
        code += coder.compress(np.packbits(bits).tobytes())
        code += coder.flush(zlib.Z_SYNC_FLUSH)  # starts a new Huffman code for each group
    return code + coder.flush()


def encode_scores(scores: Tensor, mask: Tensor, sizes: Sequence[int], bits: int) -> Tensor:
    """Compress weight scores ``(n,)`` to uint8: ``bits - 1`` bits per score, because the mask takes one bit."""
    levels = 2 ** (bits - 1)
    code, tables = np.zeros(len(scores), dtype=np.uint8), []
    for group, values in _groups(scores.detach().abs().cpu(), mask.cpu(), sizes):
        ranked = np.sort(values)
        if levels > 1:
            code[group[np.argsort(values)]] = np.arange(len(group)) * levels // max(1, len(group))
        at = np.linspace(0, max(0, len(ranked) - 1), _QUANTILES).round().astype(np.int64)
        tables.append(ranked[at] if len(ranked) else np.zeros(_QUANTILES, dtype=np.float32))
    planes = [np.packbits(code >> bit & 1) for bit in range(bits - 1)]
    data = np.concatenate([np.concatenate(tables).astype("<f4").view(np.uint8), *planes])
    return torch.from_numpy(data).to(scores.device)


def decode_scores(data: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return approximate absolute scores ``(n,)`` from ``mask`` and ``data``, a result of :func:`encode_scores`."""
    n, n_table = len(mask), 4 * 2 * len(sizes) * _QUANTILES
    coded = data.cpu().numpy()
    tables = coded[:n_table].view("<f4").reshape(-1, _QUANTILES)
    code = np.zeros(n, dtype=np.uint8)
    for bit, plane in enumerate(coded[n_table:].reshape(-1, -(-n // 8))):
        code |= np.unpackbits(plane, count=n) << bit
    generator = torch.Generator().manual_seed(derive_seed(0, "places of scores"))
    scores, places = np.empty(n, dtype=np.float32), torch.rand(n, generator=generator).numpy()
    for (group, levels), table in zip(_groups(torch.from_numpy(code), mask.cpu(), sizes), tables, strict=True):
        order = np.argsort(levels + 0.999 * places[group])  # 0.999: stay below the next level
        at = np.linspace(0, _QUANTILES - 1, len(order))
        scores[group[order]] = np.interp(at, np.arange(_QUANTILES), table)
    return torch.from_numpy(scores).to(data.device)


def _groups(values: Tensor, mask: Tensor, sizes: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return two pairs of indices and values per layer: for the entries inside ``mask``, and for all other entries."""
    groups, start = [], 0
    for size in sizes:
        chosen = mask[start : start + size].numpy()
        for part in (chosen, ~chosen):
            index = start + np.flatnonzero(part)
            groups.append((index, values.numpy()[index]))
        start += size
    return groups
