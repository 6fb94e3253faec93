"""The weights that scores choose, exactly so many and always the same ones, and ``weight ⊙ mask`` in training."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_hardshrink_backward = torch.ops.aten.hardshrink_backward.grad_input

_BAND = 0.005
"""Entries within this share of a guessed threshold are ranked: between two steps of WSN it seldom moves by more."""
_NARROW = 0.001
"""The share that is tried first: in most steps it moves by less, and fewer entries are ranked."""

_LARGEST = 1e38
"""A guess from which on the band would overflow."""
_BLOCK = 2**16
"""Entries that are compared at a time: they stay in the processor's cache."""


def count_of_share(share: float, size: int) -> int:
    """``share`` of ``size`` entries as a whole number, rounded half to even, and at least 1."""
    return max(1, round(share * size))


def mark_largest(values: Tensor, k: int, out: Tensor) -> None:
    """Mark the ``k`` largest magnitudes with 1 and all others with 0; among equal ones the lowest index goes first."""
    if not values.is_cpu or values.dtype != torch.float32:
        mark_by_sorting(values.abs(), k, out)
        return
    top = MovingTop(len(values), k)
    top.update(values)
    torch.gt(values.abs(), top.threshold, out=out)
    if top.others is not None:
        out[top.others] = 1


def mark_by_sorting(sizes: Tensor, k: int, out: Tensor) -> None:
    """As :func:`mark_largest` of what is not negative, without a number that the host would have to wait for."""
    sizes = sizes.nan_to_num(nan=-1.0, posinf=math.inf)
    threshold = sizes.sort(descending=True).values[k - 1]
    above, tied = sizes > threshold, sizes == threshold
    missing = k - above.sum()
    out.copy_(above | (tied & (tied.cumsum(0, dtype=torch.int32) <= missing)))


class MovingTop:
    """The largest magnitudes of a vector that moves little from one time to the next, as scores do between two steps.

    They are told without a mark for every entry: what lies above the threshold, and some of the entries at it.
    """

    def __init__(self, size: int, k: int) -> None:
        self.size, self._k = size, k
        self.threshold = 0.0
        self.others: Tensor | None = None
        self._above, self._band = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        self._room = np.zeros(min(size, _BLOCK), np.float32)

    def update(self, vector: Tensor) -> None:
        """Find the ``k`` largest; among equal ones the lowest index goes first, and NaN is smaller than any number."""
        values = vector.numpy()
        near = self.threshold
        shares = (_NARROW, _BAND) if 0 < near < _LARGEST else ()
        if not any(self._update_around(values, near, share) for share in shares):
            self._update_whole(values)

    def _update_around(self, values: npt.NDArray[np.float32], near: float, share: float) -> bool:
        """Rank the entries within a share of a guess of the threshold; False, and nothing changed, where it is bad."""
        low, high = np.float32(near * (1 - share)), np.float32(near * (1 + share))
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
        self._take(np.abs(values[band]), missing, band)
        return True

    def _update_whole(self, values: npt.NDArray[np.float32]) -> None:
        sizes, nowhere = np.abs(values), np.isnan(values)
        short = self._k - (self.size - int(np.count_nonzero(nowhere)))
        if short > 0:
            nowhere[np.flatnonzero(nowhere)[:short]] = False
            self.threshold, self.others = np.inf, torch.from_numpy(np.flatnonzero(~nowhere))
        else:
            sizes[nowhere] = -1
            self._take(sizes, self._k)

    def _take(self, sizes: npt.NDArray[np.float32], k: int, index: npt.NDArray[np.int64] | None = None) -> None:
        """Note the threshold that lets ``k`` of some entries through, and those at it that are among them."""
        first = len(sizes) - k
        ranked = np.partition(sizes, first)  # around one place: around two it takes ten times as long
        least = ranked[first]
        below = ranked[:first].max(initial=-1)
        if 0 <= below < least:
            self.threshold, self.others = float(below), None
            return
        tied = np.flatnonzero(sizes == least)[: k - int(np.count_nonzero(sizes > least))]
        self.threshold, self.others = float(least), torch.from_numpy(tied if index is None else index[tied])


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
