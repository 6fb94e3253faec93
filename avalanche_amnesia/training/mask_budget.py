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
    """Mask that keeps to a budget in every layer, bool ``(n_units,)``."""
    read = strongest_units(model, embedding, allowed & in_use, lambda n: _whole(reused * n)) & (embedding > 0)
    taken = strongest_units(model, embedding, allowed & ~in_use, lambda n: max(1, _whole(new * n)))
    rank = embedding.masked_fill(read | taken, torch.inf)  # what is open already counts first
    return read | taken | strongest_units(model, rank, allowed, lambda n: min_units)


def strongest_units(model: MaskedModel, embedding: Tensor, among: Tensor, how_many: Callable[[int], int]) -> Tensor:
    """Units of the largest embeddings in each layer, bool ``(n_units,)``."""
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
