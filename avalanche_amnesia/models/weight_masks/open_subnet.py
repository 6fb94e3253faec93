"""The weights that scores choose, ``weight ⊙ mask``, of the task in training."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.weight_masks.top_share import MovingTop

_hardshrink_backward = torch.ops.aten.hardshrink_backward.grad_input


class Choice:
    """The entries that scores choose, layer by layer: chosen values pass, others do not.

    Where each layer's largest ``|score|`` are chosen, on a CPU, the choice is a threshold: no mark is written, and none
    is read. All others are by marks, however ``choose`` sets them.
    """

    def __init__(
        self, sizes: Sequence[int], choose: Callable[[Tensor, Tensor], Tensor], tops: Sequence[MovingTop] = ()
    ) -> None:
        self._sizes, self._choose, self._tops = sizes, choose, tops
        self._marks, self._zero = torch.empty(0), torch.empty(0)

    def renew(self, scores: Tensor) -> None:
        """Choose by the scores of all layers, ``(n_weights,)``."""
        if self._tops and scores.is_cpu:
            for top, part in zip(self._tops, scores.split(self._sizes), strict=True):
                top.update(part)
            return
        if not len(self._marks):
            self._marks, self._zero = torch.empty_like(scores), scores.new_zeros(())
        self._choose(scores, self._marks)

    def sift(self, layer: int, scores: Tensor, values: Tensor, out: Tensor) -> None:
        """Write a layer's values where they are chosen, and +0 elsewhere, into a contiguous tensor."""
        if not self._tops or not scores.is_cpu:
            marks = self._marks.split(self._sizes)[layer].view_as(values)
            torch.addcmul(self._zero, values, marks, out=out)  # a product alone would be -0 in places
            return
        top, others = self._tops[layer], self._tops[layer].others
        besides = values if others is None else values.take(others)
        # Where |score| exceeds the threshold hardshrink's derivative is 1, else 0.
        _hardshrink_backward(values, scores.view_as(values), top.threshold, grad_input=out)
        if others is not None:
            out.view(-1).scatter_(0, others, besides)  # not put_, which deterministic algorithms exclude


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
        self.leaves = {name: weight.new_empty(weight.shape).requires_grad_() for name, weight in weights.items()}
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
