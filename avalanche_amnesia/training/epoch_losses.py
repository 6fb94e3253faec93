"""Losses of a task's mini-batches, which tell whether it has begun to learn."""

from __future__ import annotations

from torch import Tensor

_FALLEN = 0.9
"""Of the first mini-batch's loss: chosen on validation images of Omniglot's alphabets."""


class EpochLosses:
    """Mean loss of an epoch beside the first mini-batch's, where nothing was learned yet.

    Sums stay on the device: they are read once an epoch.
    """

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._sum: Tensor | None = None
        self._batches = 0

    def add(self, loss: Tensor) -> None:
        """Add a mini-batch's loss, ``()``."""
        if self._first is None:
            self._first = loss.clone()
        self._sum = loss.clone() if self._sum is None else self._sum.add_(loss)
        self._batches += 1

    def end_epoch(self) -> bool:
        """Begin a new epoch, and tell whether the one before ended with a loss that had hardly fallen."""
        if self._first is None or self._sum is None:
            return False
        first, mean = float(self._first), float(self._sum) / self._batches
        self._sum, self._batches = None, 0
        return 0 < _FALLEN * first < mean
