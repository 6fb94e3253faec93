"""Scores of a trained task in few bits per weight: where each stands among those of its layer.

What counts is the ranking of ``|score|``: the score and its gradient straight through the choice change sign together.
The task's mask, which the model keeps anyway, tells the chosen scores from the others: the first bit. Every further bit
halves the ranks among either of them. Their sizes come back from a table of quantiles, in an order within one half that
is drawn once and for all.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.seeding import derive_seed

_QUANTILES = 65
"""Sizes that are kept of the chosen scores of a layer, and as many of the others."""


def encode_scores(scores: Tensor, mask: Tensor, sizes: Sequence[int], bits: int) -> Tensor:
    """Code of scores, uint8, on their device."""
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
    """Scores ``(n,)``, of at least 0, that :func:`encode_scores` would give the same code."""
    n, n_table = len(mask), 4 * 2 * len(sizes) * _QUANTILES
    coded = data.cpu().numpy()
    tables = coded[:n_table].view("<f4").reshape(-1, _QUANTILES)
    code = np.zeros(n, dtype=np.uint8)
    for bit, plane in enumerate(coded[n_table:].reshape(-1, -(-n // 8))):
        code |= np.unpackbits(plane, count=n) << bit
    generator = torch.Generator().manual_seed(derive_seed(0, "places of scores"))
    scores, places = np.empty(n, dtype=np.float32), torch.rand(n, generator=generator).numpy()
    for (group, levels), table in zip(_groups(torch.from_numpy(code), mask.cpu(), sizes), tables, strict=True):
        order = np.argsort(levels + 0.999 * places[group])  # no place reaches the next level
        at = np.linspace(0, _QUANTILES - 1, len(order))
        scores[group[order]] = np.interp(at, np.arange(_QUANTILES), table)
    return torch.from_numpy(scores).to(data.device)


def _groups(values: Tensor, mask: Tensor, sizes: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Index and values of the scores that are chosen, and of the others, layer by layer."""
    groups, start = [], 0
    for size in sizes:
        chosen = mask[start : start + size].numpy()
        for part in (chosen, ~chosen):
            index = start + np.flatnonzero(part)
            groups.append((index, values.numpy()[index]))
        start += size
    return groups
