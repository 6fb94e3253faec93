"""The weights that scores choose, ``weight ⊙ mask``, of the task in training."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.weight_masks.choice import Choice


class OpenSubnet:
    """``weight ⊙ mask`` of every layer as leaves, whose gradients collect over every forward until the next opening."""

    @torch.no_grad()
    def __init__(
        self,
        scores: nn.Parameter,
        weights: Mapping[str, nn.Parameter],
        choice: Choice,
        straight_through: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.scores, self._weights = scores, weights
        self._sizes = [weight.numel() for weight in weights.values()]
        self.choice, self._straight_through = choice, straight_through
        self.leaves = {name: torch.empty_like(weight).requires_grad_() for name, weight in weights.items()}
        self.open()

    @torch.no_grad()
    def open(self) -> None:
        """Choose weights, and drop the gradients of those before."""
        self.choice.renew(self.scores.detach())
        parts = zip(self.leaves.values(), self._weights.values(), self.scores.split(self._sizes), strict=True)
        for layer, (leaf, weight, scores) in enumerate(parts):
            self.choice.sift(layer, scores, weight, leaf.data)
            leaf.grad = None

    @torch.no_grad()
    def pass_gradients(self) -> None:
        """Hand the gradient ``g`` of ``weight ⊙ mask`` on.

        A weight that learns gets ``g ⊙ mask``; the mask ``g ⊙ weight``, of which ``straight_through`` makes the
        gradient of the scores.
        """
        if self.scores.grad is None:
            self.scores.grad = torch.zeros_like(self.scores)
        vectors = self.scores.grad.split(self._sizes), self.scores.split(self._sizes)
        parts = zip(self.leaves.values(), self._weights.values(), *vectors, strict=True)
        for layer, (leaf, weight, of_scores, scores) in enumerate(parts):
            if leaf.grad is None:  # no backward pass reached this layer
                of_scores.zero_()
                continue
            torch.mul(leaf.grad, weight, out=of_scores.view_as(weight))
            through = self._straight_through(of_scores, scores)
            if through is not of_scores:
                of_scores.copy_(through)
            if weight.requires_grad:
                self.choice.sift(layer, scores, leaf.grad, leaf.grad)
                weight.grad = leaf.grad if weight.grad is None else weight.grad.add_(leaf.grad)
            leaf.grad = None
