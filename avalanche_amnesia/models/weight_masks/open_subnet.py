"""The weights that scores choose, ``weight ⊙ mask``, of the task in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn


class OpenSubnet:
    """``weight ⊙ mask`` of every layer as leaves, whose gradients collect over every forward until the next opening.

    Args:
        scores: of the task in training, ``(n_weights,)``.
        weights: the layers' weights, by name, in the scores' order.
        choose: writes the mask that scores choose, 0 or 1, into its second argument.
        straight_through: makes of a gradient of the mask that of the scores, ``(gradient, scores)``; may write into
            the former.

    Attributes:
        leaves: by name of the layer.
        thresholds: by name, of the last choice: room for ``choose`` to note where to look first the next time.
        room: ``(n_weights,)``, for either function to compute in: making one anew in every step takes longer.
    """

    @torch.no_grad()
    def __init__(
        self,
        scores: nn.Parameter,
        weights: Mapping[str, nn.Parameter],
        choose: Callable[[Tensor, Tensor], Tensor],
        straight_through: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.scores, self._weights = scores, weights
        self._choose, self._straight_through = choose, straight_through
        self.leaves = {name: torch.empty_like(weight).requires_grad_() for name, weight in weights.items()}
        self.thresholds: dict[str, float | None] = {}
        self._marks, self.room, self._zero = torch.empty_like(scores), torch.empty_like(scores), scores.new_zeros(())
        self.open()

    @torch.no_grad()
    def open(self) -> None:
        """Choose weights, and drop the gradients of those before."""
        self._choose(self.scores.detach(), self._marks)
        for (name, leaf), marks in zip(self.leaves.items(), self._by_layer(self._marks), strict=True):
            torch.addcmul(self._zero, self._weights[name], marks.view_as(leaf), out=leaf.data)  # +0 outside, never −0
            leaf.grad = None

    @torch.no_grad()
    def pass_gradients(self) -> None:
        """Hand the gradient ``g`` of ``weight ⊙ mask`` on.

        A weight that learns gets ``g ⊙ mask``; the mask ``g ⊙ weight``, of which ``straight_through`` makes the
        gradient of the scores.
        """
        of_mask = torch.zeros_like(self.scores) if self.scores.grad is None else self.scores.grad
        parts = zip(self.leaves.items(), self._by_layer(self._marks), self._by_layer(of_mask), strict=True)
        for (name, leaf), marks, of_part in parts:
            if leaf.grad is None:  # no backward pass reached this layer
                of_part.zero_()
                continue
            weight = self._weights[name]
            torch.mul(leaf.grad, weight.detach(), out=of_part.view_as(leaf))
            if weight.requires_grad:
                of_weight = leaf.grad.mul_(marks.view_as(leaf))
                weight.grad = of_weight if weight.grad is None else weight.grad.add_(of_weight)
            leaf.grad = None
        self.scores.grad = self._straight_through(of_mask, self.scores.detach())

    def _by_layer(self, vector: Tensor) -> Sequence[Tensor]:
        return vector.split([weight.numel() for weight in self._weights.values()])
