"""The largest entries of a vector: exactly so many, and always the same ones."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BAND = 0.005
"""Entries within this share of a guessed threshold are ranked: between two steps of WSN it moves by at most .0012."""

_LARGEST = 1e38
"""A guess from which on the band would overflow."""


def count_of_share(share: float, size: int) -> int:
    """``share`` of ``size`` entries as a whole number, rounded half to even, and at least 1."""
    return max(1, round(share * size))


def mark_largest(values: Tensor, k: int, out: Tensor, near: float | None = None) -> float | None:
    """Mark the ``k`` largest entries with 1 and all others with 0; among equal ones the lowest index goes first.

    Args:
        values: non-negative numbers, ``(n,)``, contiguous; NaN counts as smaller than any number.
        k: how many, in 1..n.
        out: receives the marks, float ``(n,)``.
        near: a guess of the ``k``-th largest, such as that of values that have moved a little since: where it is good,
            few entries are ranked. It changes nothing else.

    Returns:
        The ``k``-th largest entry; None on an accelerator, which would have to be waited for.
    """
    if values.device.type != "cpu":
        mark_by_sorting(values, k, out)
        return None
    # numpy's comparisons and quickselect take a tenth of the time of torch's.
    found = None if near is None else _mark_around(values.numpy(), k, out.numpy(), near)
    if found is not None:
        return found
    threshold = float(np.partition(values.numpy(), len(values) - k)[len(values) - k])
    torch.ge(values, threshold, out=out)
    if np.count_nonzero(values.numpy() >= np.float32(threshold)) != k:  # ties at the threshold, or NaN, which lie above
        return float(mark_by_sorting(values, k, out))
    return threshold


def mark_by_sorting(values: Tensor, k: int, out: Tensor) -> Tensor:
    """As :func:`mark_largest`, without a number that the host would have to wait for; returns the threshold, ``()``."""
    values = values.nan_to_num(nan=-1.0, posinf=math.inf)
    threshold = values.sort(descending=True).values[k - 1]
    above, tied = values > threshold, values == threshold
    missing = k - above.sum()
    out.copy_(above | (tied & (tied.cumsum(0, dtype=torch.int32) <= missing)))
    return threshold


def _mark_around(values: npt.NDArray[np.float32], k: int, out: npt.NDArray[np.float32], near: float) -> float | None:
    """As :func:`mark_largest`, ranking only the entries near a guess; None, and no marks, where the guess is bad."""
    if not 0 < near < _LARGEST:
        return None
    above = values > np.float32(near * (1 + _BAND))
    missing = k - int(np.count_nonzero(above))  # to be found among the entries of the band
    if missing <= 0:
        return None
    band = np.flatnonzero((values >= np.float32(near * (1 - _BAND))) ^ above)
    if missing > len(band):
        return None
    ranked = values[band]
    threshold = np.partition(ranked, len(ranked) - missing)[len(ranked) - missing]
    chosen = ranked > threshold
    tied = np.flatnonzero(ranked == threshold)
    chosen[tied[: missing - int(np.count_nonzero(chosen))]] = True
    np.copyto(out, above)
    out[band[chosen]] = 1
    return float(threshold)
