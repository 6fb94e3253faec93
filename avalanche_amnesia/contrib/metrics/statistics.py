"""Paired comparison of two methods over seeds, by scipy's t-test."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from avalanche_amnesia import checks


@dataclass(frozen=True)
class PairedTest:
    """Result of :func:`paired_test`: comparison of two methods over the same seeds.

    Attributes:
        n: number of seeds.
        mean_difference: mean of the first method's values minus the second's.
        interval: Student-t confidence interval of the mean difference; None for one seed, or if all differences are
            equal.
        p_value: two-sided p-value of the paired t-test; None if the interval is None.
    """

    n: int
    mean_difference: float
    interval: tuple[float, float] | None
    p_value: float | None


def paired_test(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> PairedTest:
    """Compare two methods with one value per method and seed, by :func:`scipy.stats.ttest_1samp` of the differences.

    Args:
        first: values of the first method, in the order of the seeds, n ≥ 1.
        second: values of the second method for the same seeds; subtracted from the first. If all differences are
            equal, as with one seed, there is no interval.
        confidence: confidence level of the interval, in (0, 1).

    Raises:
        ValueError: for lists of different lengths, empty lists, infinite or NaN values, or an invalid confidence.
    """
    checks.within("confidence", confidence, "(0, 1)")
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or len(a) == 0 or not np.isfinite([a, b]).all():
        raise ValueError(f"give two equally long lists of finite numbers, got {list(first)} and {list(second)}")
    # Equal decimals can differ in their last bits after a subtraction, which would make t arbitrarily large.
    scale = float(np.abs([a, b]).max()) or 1.0
    differences = np.round((a - b) / scale, 12) * scale
    mean = float((a - b).mean())
    if bool((differences == differences[0]).all()):
        return PairedTest(len(a), mean, None, None)
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(confidence)
    return PairedTest(len(a), mean, (float(low), float(high)), float(test.pvalue))
