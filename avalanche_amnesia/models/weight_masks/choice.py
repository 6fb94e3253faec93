"""Choice of weights by their scores, in every step of a training: chosen values pass, others do not."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from avalanche_amnesia.models.weight_masks.top_share import MovingTop

_hardshrink_backward = torch.ops.aten.hardshrink_backward.grad_input


class Choice(Protocol):
    """The entries that scores choose, layer by layer."""

    def renew(self, scores: Tensor) -> None:
        """Choose by the scores of all layers, ``(n_weights,)``."""

    def sift(self, layer: int, scores: Tensor, values: Tensor, out: Tensor) -> None:
        """Write a layer's values where they are chosen, and +0 elsewhere."""


class MarkedChoice:
    """A choice by marks, however they are set, on any device."""

    def __init__(self, sizes: Sequence[int], choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._sizes, self._choose = sizes, choose
        self._marks, self._zero = torch.empty(0), torch.empty(0)

    def renew(self, scores: Tensor) -> None:
        """As the protocol's."""
        if not len(self._marks):
            self._marks, self._zero = torch.empty_like(scores), scores.new_zeros(())
        self._choose(scores, self._marks)

    def sift(self, layer: int, scores: Tensor, values: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        marks = self._marks.split(self._sizes)[layer].view_as(values)
        torch.addcmul(self._zero, values, marks, out=out)  # a product alone would be -0 in places


class TopChoice:
    """The choice of each layer's largest ``|score|`` by a threshold: no mark is written, and none is read."""

    def __init__(self, tops: Sequence[MovingTop], elsewhere: Choice) -> None:
        self._tops, self._elsewhere = tops, elsewhere

    def renew(self, scores: Tensor) -> None:
        """As the protocol's."""
        if not scores.is_cpu:
            self._elsewhere.renew(scores)
            return
        for top, part in zip(self._tops, scores.split([top.size for top in self._tops]), strict=True):
            top.update(part)

    def sift(self, layer: int, scores: Tensor, values: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        if not scores.is_cpu:
            self._elsewhere.sift(layer, scores, values, out)
            return
        top, others = self._tops[layer], self._tops[layer].others
        besides = values if others is None else values.take(others)
        # Where |score| exceeds the threshold hardshrink's derivative is 1, else 0.
        _hardshrink_backward(values, scores.view_as(values), top.threshold, grad_input=out)
        if others is not None:
            out.put_(others, besides)
