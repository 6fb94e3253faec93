"""Formulas of hard attention (HAT, Serrà et al., 2018; HAT-CL, Duan, 2023): gate, sparsity, units within a budget."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Annealing = Literal["linear", "cosine"]
EmbeddingInit = Literal["normal", "uniform", "positive", "negative", "last", "ones", "open", "sparse"]
SparsityMode = Literal["original", "cross", "quota"]
LayerSparsity = Sequence[float | Tensor]
"""``κ`` per layer: numbers, or tensors ``()`` on an accelerator, because reading a number waits for the device."""


def mask_scale(batch: int, n_batches: int, s_max: float, annealing: Annealing = "linear") -> float:
    """Return the annealed scale ``s`` of the gate ``σ(s·e)`` for mini-batch number ``batch`` of ``n_batches``."""
    progress = batch / (n_batches - 1) if n_batches > 1 else 1.0
    if annealing == "cosine":
        return max(s_max / 2 * (1 + math.cos(2 * math.pi * progress)), 1 / s_max)
    return 1 / s_max + (s_max - 1 / s_max) * progress


def embedding_gradient(of_gate: Tensor, gate: Tensor, scale: float) -> Tensor:
    """Return ``∂loss/∂e = ∂loss/∂a · (1 - a)·a·s`` for the gate ``a = σ(s·e)``: exactly 0 for a saturated sigmoid."""
    return torch.ops.aten.sigmoid_backward.default(of_gate, gate).mul_(scale)


def rescale_embedding_gradient_(gradient: Tensor, embedding: Tensor, scale: float, s_max: float, clamp: float) -> None:
    """Rescale the embedding's gradient in place, to undo the effect of the annealed scale ``s`` (HAT, eq. 5).

    ``q ← s_max·[cosh(clamp(s·e, ±c)) + 1] / (s·[cosh(e) + 1]) · q``, evaluated as published: the shorter form that
    algebra allows differs in float32, where a saturated sigmoid must let no gradient through.
    """
    numerator = (embedding * scale).clamp_(-clamp, clamp).cosh_().add_(1)
    gradient.mul_(numerator).mul_(s_max / scale).div_(embedding.cosh().add_(1))


def initial_embedding(
    kind: EmbeddingInit, n_units: int, generator: torch.Generator, last: Tensor | None = None, *, n_tasks: int
) -> Tensor:
    """Return the initial mask embedding of a task, ``(n_units,)``.

    Reference: Serrà et al., ICML 2018; ``ones`` and an initialisation by share: Duan, HAT-CL, 2023.
    """
    if kind == "last" and last is not None:
        return last.clone().cpu()
    if kind == "ones":
        return torch.ones(n_units)
    if kind in ("normal", "last"):
        return torch.randn(n_units, generator=generator)
    if kind == "sparse":
        size = torch.randn(n_units, generator=generator).abs()
        return torch.where(torch.rand(n_units, generator=generator, dtype=torch.float64) < 1 / n_tasks, size, -size)
    low, high = {"uniform": (-1.0, 1.0), "positive": (0.0, 1.0), "negative": (-1.0, 0.0), "open": (1.0, 1.01)}[kind]
    return torch.rand(n_units, generator=generator) * (high - low) + low


class SparsityRegulariser:
    """Sparsity penalty ``λ·R``; in mode ``original``, ``R`` is the mask's mean over units unused by earlier tasks."""

    def __init__(self, weight: float, mode: SparsityMode, in_use: Tensor, sizes: Sequence[int], n_tasks: float) -> None:
        self.weight, self.mode, self.quota = weight, mode, 1 / n_tasks
        free, used = (~in_use).float(), in_use.float()
        slope = free / free.sum().clamp_min(1)
        self._constant = 0.0
        if mode == "cross" and in_use.any():
            slope = (slope - used / used.sum()) / 2
            self._constant = weight / 2
        self._slope = weight * slope
        # (layers, n_units): a row is 1 at the units of its layer, so that a product with a vector sums it by layer.
        layers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        of_layer = torch.nn.functional.one_hot(layers, len(sizes)).T.float().to(in_use.device) * free
        self._free_share_by_layer = of_layer / of_layer.sum(1, keepdim=True).clamp_min(1)

    def __call__(self, gate: Tensor) -> Tensor:
        """Return the penalty ``λ·R``, a scalar, of a soft mask ``gate``, ``(n_units,)``."""
        if self.mode == "quota":
            return self.weight * (self.layer_sparsity(gate) - self.quota).clamp_min(0).sum()
        value = torch.dot(gate, self._slope)
        return value + self._constant if self._constant else value

    def gradient(self, gate: Tensor) -> Tensor:
        """Return this regulariser's gradient, ``λ·∂R/∂a``, ``(n_units,)``, at a soft mask ``a``, ``(n_units,)``."""
        if self.mode == "quota":
            return self.weight * ((self.layer_sparsity(gate) > self.quota).float() @ self._free_share_by_layer)
        return self._slope

    def layer_sparsity(self, gate: Tensor) -> Tensor:
        """Return each layer's sparsity ``κ_l = Σ a(1-a^{<t}) / Σ (1-a^{<t})``, ``(layers,)``; 0 if no unit is free."""
        return self._free_share_by_layer @ gate

    def layer_sparsities(self, gate: Tensor) -> LayerSparsity:
        """Return each layer's sparsity: a list of floats on the CPU, a tuple of scalar tensors on an accelerator."""
        by_layer = self.layer_sparsity(gate)
        return by_layer.tolist() if by_layer.device.type == "cpu" else by_layer.unbind()


def units_within_budget(
    sizes: Sequence[int],
    embedding: Tensor,
    in_use: Tensor,
    new: float,
    reused: float,
    *,
    min_units: int,
) -> Tensor:
    """Return a bool mask of each layer's largest embeddings: fraction ``new`` of free, ``reused`` of used units."""
    read = strongest_units(sizes, embedding, in_use, lambda n: _floor(reused * n)) & (embedding > 0)
    taken = strongest_units(sizes, embedding, ~in_use, lambda n: max(1, _floor(new * n)))
    rank = embedding.masked_fill(read | taken, torch.inf)  # units that are open already rank first
    return read | taken | strongest_units(sizes, rank, torch.ones_like(in_use), lambda n: min_units)


def strongest_units(sizes: Sequence[int], embedding: Tensor, among: Tensor, how_many: Callable[[int], int]) -> Tensor:
    """Return a bool mask: of each layer's ``n`` units in the mask ``among``, the ``how_many(n)`` largest embeddings."""
    strongest, start = torch.zeros_like(among), 0
    for size in sizes:
        part = slice(start, start + size)
        n = int(among[part].sum())
        rank = embedding[part].masked_fill(~among[part], -torch.inf)
        strongest[start + rank.topk(min(how_many(n), n)).indices] = True
        start += size
    return strongest


def _floor(units: float) -> int:
    return math.floor(units + 1e-9)  # 0.29 · 100 is 28.999… in floating point
