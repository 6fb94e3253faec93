"""Deterministic choice of exactly ``k`` weights with the largest ``|score|``, and ``weight ⊙ mask`` in training."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_hardshrink_backward = torch.ops.aten.hardshrink_backward.grad_input

_BAND = 0.005
"""Relative width of the band around the last threshold that is searched first; a step seldom moves it further."""
_LARGEST = 1e38
"""Thresholds above this are not used as a guess, because the band would overflow."""
_BLOCK = 2**16
"""Number of entries compared at a time, so that they fit into the processor's cache."""


def count_of_share(share: float, size: int) -> int:
    """Return ``share · size`` as an integer, rounded half to even, at least 1."""
    return max(1, round(share * size))


def mark_largest(values: Tensor, k: int, out: Tensor) -> None:
    """Write 1 into ``out`` at the ``k`` largest magnitudes of ``values``, 0 elsewhere; lowest index first if equal."""
    if not values.is_cpu or values.dtype != torch.float32:
        mark_by_sort(values.abs(), k, out)
        return
    top = TopTracker(len(values), k)
    top.update(values)
    torch.gt(values.abs(), top.threshold, out=out)
    if top.others is not None:
        out[top.others] = 1


def mark_by_sort(sizes: Tensor, k: int, out: Tensor) -> None:
    """Write 1 into ``out`` at the ``k`` largest of nonnegative ``sizes``, 0 elsewhere, without synchronising a GPU."""
    sizes = sizes.nan_to_num(nan=-1.0, posinf=math.inf)
    threshold = sizes.sort(descending=True).values[k - 1]
    above, tied = sizes > threshold, sizes == threshold
    missing = k - above.sum()
    out.copy_(above | (tied & (tied.cumsum(0, dtype=torch.int32) <= missing)))


class TopTracker:
    """Finder of the ``k`` largest magnitudes of a vector that changes slowly, e.g. of scores from step to step.

    The result is a threshold and an index: all entries above ``threshold``, and the entries at positions ``others``.
    """

    def __init__(self, size: int, k: int) -> None:
        self.size, self._k = size, k
        self.threshold = 0.0
        self.others: Tensor | None = None
        self._above, self._band = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        self._room = np.zeros(min(size, _BLOCK), np.float32)

    def update(self, vector: Tensor) -> None:
        """Find the ``k`` largest magnitudes of ``vector``: of equal ones, the lowest index first; NaN comes last."""
        values = vector.numpy()
        if not (0 < self.threshold < _LARGEST and self._search_near(values, self.threshold)):
            self._update_whole(values)

    def _search_near(self, values: npt.NDArray[np.float32], guess: float) -> bool:
        """Try to find the ``k`` largest magnitudes with a threshold near ``guess``; return False on failure."""
        low, high = np.float32(guess * (1 - _BAND)), np.float32(guess * (1 + _BAND))
        for start in range(0, self.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            sizes = np.abs(values[block], out=self._room[: self.size - start])
            np.greater(sizes, high, out=self._above[block])
            np.greater_equal(sizes, low, out=self._band[block])
        self._band ^= self._above
        missing = self._k - int(np.count_nonzero(self._above))  # to be found among the entries of the band
        band = np.flatnonzero(self._band)
        if not 0 < missing <= len(band):
            return False
        self._select(np.abs(values[band]), missing, band)
        return True

    def _update_whole(self, values: npt.NDArray[np.float32]) -> None:
        sizes, nowhere = np.abs(values), np.isnan(values)
        short = self._k - (self.size - int(np.count_nonzero(nowhere)))
        if short > 0:
            nowhere[np.flatnonzero(nowhere)[:short]] = False
            self.threshold, self.others = np.inf, torch.from_numpy(np.flatnonzero(~nowhere))
        else:
            sizes[nowhere] = -1
            self._select(sizes, self._k)

    def _select(self, sizes: npt.NDArray[np.float32], k: int, index: npt.NDArray[np.int64] | None = None) -> None:
        """Find the ``k`` largest ``sizes``: set ``threshold``, and the positions ``others`` of ties to include."""
        first = len(sizes) - k
        ranked = np.partition(sizes, first)  # one pivot: two take ten times as long
        least = ranked[first]
        below = ranked[:first].max(initial=-1)
        if 0 <= below < least:
            self.threshold, self.others = float(below), None
            return
        tied = np.flatnonzero(sizes == least)[: k - int(np.count_nonzero(sizes > least))]
        self.threshold, self.others = float(least), torch.from_numpy(tied if index is None else index[tied])


class ChosenWeights:
    """Leaf tensors ``weight ⊙ mask``, one per layer, that replace the weights in training and collect gradients.

    On a CPU, if the largest ``|score|`` of each layer are chosen, only a threshold is stored (``tops``). Otherwise
    ``choose`` writes a mark for each entry.
    """

    @torch.no_grad()
    def __init__(
        self,
        scores: nn.Parameter,
        weights: Mapping[str, nn.Parameter],
        choose: Callable[[Tensor, Tensor], Tensor],
        straight_through: Callable[[Tensor, Tensor], Tensor],
        tops: Sequence[TopTracker] = (),
    ) -> None:
        self.scores, self._weights = scores, weights
        self._sizes = [weight.numel() for weight in weights.values()]
        self._choose, self._straight_through, self._tops = choose, straight_through, tops
        self._marks = torch.empty(0)
        self.leaves = {name: weight.new_empty(weight.shape).requires_grad_() for name, weight in weights.items()}
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Recompute the leaves ``weight ⊙ mask`` from the current scores, and clear their gradients."""
        parts = self.scores.split(self._sizes)
        if self._tops and self.scores.is_cpu:
            for top, scores in zip(self._tops, parts, strict=True):
                top.update(scores.detach())
        else:
            if not len(self._marks):
                self._marks, self._zero = torch.empty_like(self.scores), self.scores.new_zeros(())
            self._choose(self.scores.detach(), self._marks)
        triples = zip(self.leaves.values(), self._weights.values(), parts, strict=True)
        for layer, (leaf, weight, scores) in enumerate(triples):
            self.copy_chosen(layer, scores, weight, leaf.data)
            leaf.grad = None

    def copy_chosen(self, layer: int, scores: Tensor, values: Tensor, out: Tensor) -> None:
        """Copy ``values`` at a layer's chosen weights into the contiguous tensor ``out``, and write +0 elsewhere."""
        if not self._tops or not scores.is_cpu:
            marks = self._marks.split(self._sizes)[layer].view_as(values)
            torch.addcmul(self._zero, values, marks, out=out)  # adding +0 turns -0 into +0
            return
        top, others = self._tops[layer], self._tops[layer].others
        besides = values if others is None else values.take(others)
        # hardshrink's derivative is 1 if |score| exceeds the threshold, else 0.
        _hardshrink_backward(values, scores.view_as(values), top.threshold, grad_input=out)
        if others is not None:
            out.view(-1).scatter_(0, others, besides)  # not put_, which deterministic algorithms exclude

    @torch.no_grad()
    def pass_gradients(self) -> None:
        """Compute the gradients of weights and scores from the gradient ``g`` of ``weight ⊙ mask``.

        Trainable weights get ``g ⊙ mask``. The mask gets ``g ⊙ weight``, which ``straight_through`` converts to the
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
                self.copy_chosen(layer, scores, leaf.grad, leaf.grad)
                weight.grad = leaf.grad if weight.grad is None else weight.grad.add_(leaf.grad)
            leaf.grad = None
