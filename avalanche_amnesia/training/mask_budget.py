"""Units that a task keeps under a budget: the strongest of those that are free, and of those in use."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from avalanche_amnesia.models.masked import MaskedModel


def units_within(
    model: MaskedModel,
    embedding: Tensor,
    allowed: Tensor,
    in_use: Tensor,
    new: float,
    reused: float,
    *,
    min_units: int,
) -> Tensor:
    """Mask that keeps to a budget in every layer, bool ``(n_units,)``.

    Args:
        model: names the layers.
        embedding: of the task's mask at the end of its warm-up, ``(n_units,)``.
        allowed: units that the task may open, bool ``(n_units,)``.
        in_use: units that other tasks use, bool ``(n_units,)``.
        new: share of the free units that it takes; at least one where one is free.
        reused: largest share of the units in use that it reads, of those whose embedding is above 0.
        min_units: a layer never has fewer open units.
    """
    read = strongest_units(model, embedding, allowed & in_use, lambda n: _whole(reused * n)) & (embedding > 0)
    taken = strongest_units(model, embedding, allowed & ~in_use, lambda n: max(1, _whole(new * n)))
    rank = embedding.masked_fill(read | taken, torch.inf)  # what is open already counts first
    return read | taken | strongest_units(model, rank, allowed, lambda n: min_units)


def strongest_units(model: MaskedModel, embedding: Tensor, among: Tensor, how_many: Callable[[int], int]) -> Tensor:
    """Units of the largest embeddings in each layer, bool ``(n_units,)``.

    Args:
        model: names the layers.
        embedding: ``(n_units,)``.
        among: units that count, bool ``(n_units,)``.
        how_many: of a layer, by the number of its units that count.
    """
    strongest, start = torch.zeros_like(among), 0
    for layer in model.graph.layers.values():
        part = slice(start, start + layer.units)
        n = int(among[part].sum())
        rank = embedding[part].masked_fill(~among[part], -torch.inf)
        strongest[start + rank.topk(min(how_many(n), n)).indices] = True
        start += layer.units
    return strongest


def _whole(units: float) -> int:
    return math.floor(units + 1e-9)  # 0.29 · 100 is 28.999… in floating point
