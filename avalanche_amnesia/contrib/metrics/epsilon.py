"""Leak that an attack shows in terms of (ε, δ)-indistinguishability, and the most that n runs can show.

Let a model that learned and unlearned a task, and one that never saw it, be (ε, δ)-indistinguishable: for every set S
of outcomes ``P(S) ≤ e^ε Q(S) + δ`` and ``Q(S) ≤ e^ε P(S) + δ``. An attack guesses "learned" on some set: wrongly on a
share FPR of the models that never saw the task, and it misses a share FNR of the others. Put into the two inequalities
this says (Kairouz, Oh and Viswanath, The composition theorem for differential privacy, ICML 2015)

    ε ≥ ln((1 − δ − FPR) / FNR)   and   ε ≥ ln((1 − δ − FNR) / FPR).

The rates are known only from runs. With their upper confidence bounds instead, the larger of the two right sides is a
lower bound of ε (Jagielski, Ullman and Oprea, Auditing differentially private machine learning, NeurIPS 2020).
"""

import math
from typing import Literal

from scipy import stats

from avalanche_amnesia import checks

Bound = Literal["clopper-pearson", "any"]


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
