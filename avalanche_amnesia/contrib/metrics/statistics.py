"""What runs can show: a paired comparison of two methods over seeds, and the ε that an attack's errors imply."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from avalanche_amnesia import checks

Bound = Literal["clopper-pearson", "any"]


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


# Leak that an attack shows in terms of (ε, δ)-indistinguishability, and the most that n runs can show.
#
# Let a model that learned and unlearned a task, and one that never saw it, be (ε, δ)-indistinguishable: for every set S
# of outcomes ``P(S) ≤ e^ε Q(S) + δ`` and ``Q(S) ≤ e^ε P(S) + δ``. An attack guesses "learned" on some set: wrongly on a
# share FPR of the models that never saw the task, and it misses a share FNR of the others. Put into the inequalities
# this says (Kairouz, Oh and Viswanath, The composition theorem for differential privacy, ICML 2015)
#
#     ε ≥ ln((1 − δ − FPR) / FNR)   and   ε ≥ ln((1 − δ − FNR) / FPR).
#
# The rates are known only from runs. With their upper confidence bounds instead, the larger of the two right sides is a
# lower bound of ε (Jagielski, Ullman and Oprea, Auditing differentially private machine learning, NeurIPS 2020).


def epsilon_lower_bound(
    false_positives: int,
    false_negatives: int,
    runs_without: int,
    runs_with: int,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
) -> float:
    """Lower confidence bound of ε from the errors of an attack, by Clopper–Pearson bounds of both error rates.

    ``max(0, ln((1 − δ − FPR⁺)/FNR⁺), ln((1 − δ − FNR⁺)/FPR⁺))``, where each of ``FPR⁺`` and ``FNR⁺`` is exceeded with a
    probability of at most ``(1 − confidence)/2``, so that both hold with the confidence.

    Args:
        false_positives: runs that never saw the task, and for which the attack guessed "learned".
        false_negatives: runs that learned and unlearned it, and for which the attack guessed "never".
        runs_without: independent runs that never saw the task, one guess each, at least 1.
        runs_with: independent runs that learned and unlearned it, at least 1. Whatever the attack chooses (a threshold,
            say) must have been chosen on other runs than these.
        delta: δ in [0, 1).
        confidence: in (0, 1).

    Returns:
        At least 0: nothing was shown. A lower bound is no claim that ε is this small.

    Raises:
        ValueError: for numbers that are not allowed.
    """
    _check(delta, confidence)
    bounds = []
    for name, errors, of, runs in (
        ("false_positives", false_positives, "runs_without", runs_without),
        ("false_negatives", false_negatives, "runs_with", runs_with),
    ):
        n, k = checks.whole_number(of, runs), checks.whole_number(name, errors, 0)
        if k > n:
            raise ValueError(f"{name} must be at most {of}={n}, got {k}")
        bounds.append(1.0 if k == n else float(stats.beta.ppf((1 + confidence) / 2, k + 1, n - k)))
    fpr, fnr = bounds
    ratio = max((1 - delta - fpr) / fnr, (1 - delta - fnr) / fpr)
    return math.log(ratio) if ratio > 1 else 0.0


def largest_epsilon(
    runs: int, *, delta: float = 0.0, confidence: float = 0.95, bound: Bound = "clopper-pearson"
) -> float:
    """Largest ε that an attack can show from n runs with the task and n without, however much is left.

    A limit of the experiment, and no claim about a method. It is what a perfect attacker gets, who never errs. That an
    unlearning is (ε, δ)-indistinguishable for an ε of this size or more is a claim that these runs can't refute,
    whatever they show; and a lower bound of 0 from a few runs says nothing where this number is small too.

    * ``clopper-pearson``: :func:`epsilon_lower_bound` without an error. Both rates are then at most
      ``u = 1 − ((1 − confidence)/2)^(1/n)``, which gives ``max(0, ln((1 − δ − u)/u))``. At 95 % and δ = 0 that
      is 0 up to five runs of each kind, .81 for ten, 1.60 for twenty, 3.28 for a hundred.
    * ``any``: no procedure at all that is valid at this confidence can show more from one guess per run. If ε held, the
      chance of n + n right guesses is at most ``((e^ε + δ)/(1 + e^ε))^(2n)``, reached where both error rates are
      ``(1 − δ)/(1 + e^ε)``; to rule ε out on seeing them, that chance must be at most ``1 − confidence``. Hence
      ``max(0, ln((p − δ)/(1 − p)))`` with ``p = (1 − confidence)^(1/2n)``.

    Args:
        runs: independent runs n of each kind, at least 1, one guess each.
        delta: δ in [0, 1).
        confidence: in (0, 1).
        bound: which of the two limits.

    Raises:
        ValueError: for numbers or a bound that are not allowed.
    """
    n = checks.whole_number("runs", runs)
    checks.one_of("bound", bound, Bound)
    if bound == "clopper-pearson":
        return epsilon_lower_bound(0, 0, n, n, delta=delta, confidence=confidence)
    _check(delta, confidence)
    p = (1 - confidence) ** (1 / (2 * n))
    return math.log((p - delta) / (1 - p)) if p - delta > 1 - p else 0.0


def _check(delta: float, confidence: float) -> None:
    checks.within("delta", delta, "[0, 1)")
    checks.within("confidence", confidence, "(0, 1)")
