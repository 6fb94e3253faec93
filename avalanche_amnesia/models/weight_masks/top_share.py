"""The largest entries of a vector: exactly so many, and always the same ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def count_of_share(share: float, size: int) -> int:
    """``share`` of ``size`` entries as a whole number, rounded half to even, and at least 1."""
    return max(1, round(share * size))


def mark_largest(values: Tensor, k: int, out: Tensor) -> None:
    """Mark the ``k`` largest entries with 1 and all others with 0; among equal ones the lowest index goes first.

    Args:
        values: non-negative numbers, ``(n,)``, contiguous; NaN counts as smaller than any number.
        k: how many, in 1..n.
        out: receives the marks, float ``(n,)``.
    """
    if values.device.type == "cpu":  # numpy's quickselect takes a tenth of the time of torch's kthvalue
        threshold = float(np.partition(values.numpy(), len(values) - k)[len(values) - k])
    else:
        threshold = float(values.kthvalue(len(values) - k + 1).values)
    if threshold != threshold:
        mark_largest(values.nan_to_num(nan=-1.0), k, out)
        return
    torch.ge(values, threshold, out=out)
    if _count_from(values, threshold) != k:  # ties at the threshold, or NaN above it
        values = values.nan_to_num(nan=-1.0)
        threshold = float(values.kthvalue(len(values) - k + 1).values)
        torch.gt(values, threshold, out=out)
        tied = (values == threshold).nonzero()[:, 0]
        out[tied[: k - int(torch.count_nonzero(out))]] = 1


def _count_from(values: Tensor, threshold: float) -> int:
    """Number of entries that are not below the threshold."""
    if values.device.type == "cpu":  # torch's own count takes as long as the quickselect
        return int(np.count_nonzero(values.numpy() >= np.float32(threshold)))
    return int(torch.count_nonzero(values >= threshold))
