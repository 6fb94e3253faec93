"""The weights that scores choose, ``weight ⊙ mask``, of the task in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.weight_masks.choice import Choice

_BLOCK = 2**18
"""Entries of which scores get their gradients at a time, where there are more: they stay in the processor's cache."""


class OpenSubnet:
    """``weight ⊙ mask`` of every layer as leaves, whose gradients collect over every forward until the next opening.

    Args:
        scores: of the task in training, ``(n_weights,)``.
        weights: the layers' weights, by name, in the scores' order.
        choice: what scores choose.
        straight_through: makes of a gradient of the mask that of the scores, ``(gradient, scores)``, for any part of
            them; may write into the former.

    Attributes:
        leaves: by name of the layer.
        choice: as given.
        room: ``(n_weights,)``, for ``straight_through`` to compute in: making one anew in every step takes longer.
    """

    @torch.no_grad()
    def __init__(
        self,
        scores: nn.Parameter,
        weights: Mapping[str, nn.Parameter],
        choice: Choice,
        straight_through: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.scores, self._weights = scores, weights
        self.choice, self._straight_through = choice, straight_through
        self.leaves = {name: torch.empty_like(weight).requires_grad_() for name, weight in weights.items()}
        self.room = torch.empty_like(scores)
        self.open()

    @torch.no_grad()
    def open(self) -> None:
        """Choose weights, and drop the gradients of those before."""
        self.choice.renew(self.scores.detach())
        parts = zip(self.leaves.values(), self._weights.values(), self._by_layer(self.scores.detach()), strict=True)
        for layer, (leaf, weight, scores) in enumerate(parts):
            self.choice.sift(layer, scores, weight.detach(), leaf.data)
            leaf.grad = None

    @torch.no_grad()
    def pass_gradients(self) -> None:
        """Hand the gradient ``g`` of ``weight ⊙ mask`` on.

        A weight that learns gets ``g ⊙ mask``; the mask ``g ⊙ weight``, of which ``straight_through`` makes the
        gradient of the scores.
        """
        if self.scores.grad is None:
            self.scores.grad = torch.zeros_like(self.scores)
        vectors = self._by_layer(self.scores.grad), self._by_layer(self.scores.detach())
        parts = zip(self.leaves.values(), self._weights.values(), *vectors, strict=True)
        for layer, (leaf, weight, of_scores, scores) in enumerate(parts):
            if leaf.grad is None:  # no backward pass reached this layer
                of_scores.zero_()
                continue
            self._pass_to_scores(leaf.grad, weight.detach(), of_scores, scores)
            if weight.requires_grad:
                self.choice.sift(layer, scores, leaf.grad, leaf.grad)
                weight.grad = leaf.grad if weight.grad is None else weight.grad.add_(leaf.grad)
            leaf.grad = None

    def _pass_to_scores(self, of_weight: Tensor, weight: Tensor, of_scores: Tensor, scores: Tensor) -> None:
        """Write the gradient of a layer's scores; that of a large layer some rows at a time."""
        if weight.numel() > _BLOCK and weight.device.type == "cpu":
            width = weight[0].numel()
            rows = max(1, _BLOCK // width)
            matrices, vectors = (of_weight.split(rows), weight.split(rows)), (of_scores, scores)
            for part in zip(*matrices, *(vector.split(rows * width) for vector in vectors), strict=True):
                self._write_gradient(*part)
        else:
            self._write_gradient(of_weight, weight, of_scores, scores)

    def _write_gradient(self, of_weight: Tensor, weight: Tensor, of_scores: Tensor, scores: Tensor) -> None:
        torch.mul(of_weight, weight, out=of_scores.view_as(weight))
        through = self._straight_through(of_scores, scores)
        if through is not of_scores:
            of_scores.copy_(through)

    def _by_layer(self, vector: Tensor) -> Sequence[Tensor]:
        return vector.split([weight.numel() for weight in self._weights.values()])
