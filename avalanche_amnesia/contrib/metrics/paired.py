"""Paired comparison of two methods over seeds, and what a few seeds can show at all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from avalanche_amnesia import checks


@dataclass(frozen=True)
class PairedTest:
    """Comparison of two methods, seed by seed; None where too few or equal differences give no number.

    Attributes:
        n: seeds.
        mean_difference: mean of first minus second.
        interval: Student-t confidence interval of the mean difference, which takes differences for normal; None for one
            seed, and where all differences are equal.
        t_p: two-sided p-value of the paired t-test, None likewise.
        effect: Cohen's ``d_z``, mean over standard deviation of the differences, None likewise.
        wilcoxon_p: two-sided, exact p-value of Wilcoxon's signed-rank test, which takes differences for symmetric.
        smallest_p: the smallest ``wilcoxon_p`` that n seeds can give, see :func:`smallest_p`.
    """

    n: int
    mean_difference: float
    interval: tuple[float, float] | None
    t_p: float | None
    effect: float | None
    wilcoxon_p: float
    smallest_p: float


def paired_test(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> PairedTest:
    """Paired comparison of two methods' values, one of each per seed.

    Args:
        first: values of the first method, in the order of the seeds, n ≥ 1.
        second: of the second method, for the same seeds.
        confidence: of the interval, in (0, 1).

    Raises:
        ValueError: for lists of different lengths, empty or with values that are not finite, or another confidence.

    Reference: Wilcoxon, Individual comparisons by ranking methods, Biometrics Bulletin 1945; Demšar, Statistical
    comparisons of classifiers over multiple data sets, JMLR 2006.
    """
    checks.within("confidence", confidence, "(0, 1)")
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or len(a) == 0 or not np.isfinite([a, b]).all():
        raise ValueError(
            "expected two lists of as many finite numbers, one per seed and at least one, got "
            f"{list(first)} and {list(second)}"
        )
    n, mean = len(a), float((a - b).mean())
    # Equal differences of decimals differ in their last bits, which would rank them, and make t as large as it gets.
    scale = float(np.abs([a, b]).max()) or 1.0
    differences = np.round((a - b) / scale, 12) * scale
    varies = bool((differences != differences[0]).any())
    interval = t_p = effect = None
    if varies:
        deviation = float(differences.std(ddof=1))
        half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * deviation / math.sqrt(n)
        interval, effect = (mean - half, mean + half), mean / deviation
        t_p = float(stats.ttest_rel(a, b).pvalue)
    return PairedTest(n, mean, interval, t_p, effect, _wilcoxon(differences), smallest_p(n))


def smallest_p(n: int) -> float:
    """Smallest two-sided p-value that an exact Wilcoxon signed-rank test of n pairs can give: ``2 · 2⁻ⁿ``.

    All differences have one sign then, which chance does in 2 of 2ⁿ cases. Five seeds can't go below 0.0625: no
    difference between two methods, however large, is significant at 0.05; six can (0.03125).
    ``ValueError`` for n below 1.
    """
    return 2.0 ** (1 - checks.whole_number("n", n))


def _wilcoxon(differences: np.ndarray) -> float:
    """Two-sided p-value by the distribution over all signs; zeros are dropped, ties share their mean rank."""
    kept = differences[differences != 0]
    doubled = np.rint(2 * stats.rankdata(np.abs(kept))).astype(int)  # mean ranks of ties are halves
    chance = np.zeros(doubled.sum() + 1)
    chance[0] = 1.0
    for rank in doubled:  # each difference is positive, and adds its rank, with probability ½
        chance[rank:] = (chance[rank:] + chance[: len(chance) - rank]) / 2
        chance[:rank] /= 2
    observed = int(doubled[kept > 0].sum())
    return min(1.0, 2 * float(min(chance[: observed + 1].sum(), chance[observed:].sum())))
