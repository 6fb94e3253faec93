"""Paired tests against scipy and all sign patterns; bounds of ε against scipy's, their coverage, and a search."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from avalanche_amnesia.contrib.metrics import epsilon_lower_bound, largest_epsilon, paired_test, smallest_p


def by_all_signs(differences):
    """Wilcoxon's p-value over every pattern of signs, one by one."""
    kept = [d for d in differences if d]
    ranks = stats.rankdata(np.abs(kept)) if kept else []
    observed = sum(rank for rank, d in zip(ranks, kept, strict=True) if d > 0)
    sums = [sum(r for r, up in zip(ranks, ups, strict=True) if up) for ups in product((0, 1), repeat=len(kept))]
    tails = [sum(s <= observed for s in sums), sum(s >= observed for s in sums)]
    return min(1.0, 2 * min(tails) / len(sums))


@pytest.mark.parametrize("n", [2, 3, 5, 9, 14])
def test_without_ties_it_is_scipy_s(n):
    generator = np.random.default_rng(n)
    a, b = generator.random(n), generator.random(n) + 0.1
    test = paired_test(a.tolist(), b.tolist(), confidence=0.9)
    theirs = stats.ttest_rel(a, b)
    assert test.t_p == pytest.approx(theirs.pvalue)
    assert test.interval == pytest.approx(tuple(theirs.confidence_interval(0.9)))
    assert test.wilcoxon_p == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue)
    assert test.effect == pytest.approx((a - b).mean() / (a - b).std(ddof=1))
    assert test.effect == pytest.approx(theirs.statistic / math.sqrt(n))
    assert (test.n, test.smallest_p) == (n, 2 / 2**n)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_ties_and_zeros_are_counted_over_all_signs(differences):
    test = paired_test([0.5 + d / 10 for d in differences], [0.5] * len(differences))
    assert test.wilcoxon_p == pytest.approx(by_all_signs(differences))
    assert test.mean_difference == pytest.approx(np.mean(differences) / 10, abs=1e-15)
    assert test.wilcoxon_p >= test.smallest_p * (1 - 1e-12)


@pytest.mark.parametrize("n", range(1, 9))
def test_the_smallest_p_is_that_of_differences_of_one_sign(n):
    assert smallest_p(n) == pytest.approx(by_all_signs(range(1, n + 1)))
    assert paired_test(list(range(1, n + 1)), [0] * n).wilcoxon_p == pytest.approx(smallest_p(n))


def test_equal_differences_give_no_t_whatever_their_last_bits():
    test = paired_test([0.8, 0.9, 0.3], [0.7, 0.8, 0.2])  # 0.1 each, but for the last bits
    assert test.mean_difference == pytest.approx(0.1)
    assert test.interval is test.t_p is test.effect is None
    assert test.wilcoxon_p == 0.25
    assert paired_test([0.5], [0.4]).interval is None
    assert paired_test([0.5, 0.5], [0.5, 0.5]).wilcoxon_p == 1


@pytest.mark.parametrize(
    ("first", "second", "options", "message"),
    [
        ([], [], {}, "as many finite numbers"),
        ([1.0], [1.0, 2.0], {}, r"got \[1.0\] and \[1.0, 2.0\]"),
        ([math.nan], [1.0], {}, "as many finite numbers"),
        ([1.0], [2.0], {"confidence": 95}, r"in \(0, 1\), got 95"),
    ],
)
def test_lists_that_do_not_pair_are_refused(first, second, options, message):
    with pytest.raises(ValueError, match=message):
        paired_test(first, second, **options)
    with pytest.raises(ValueError, match="n must be an int of at least 1"):
        smallest_p(len(first) * 0)


# ε ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k0", "n0", "k1", "n1"), [(0, 8, 0, 8), (1, 30, 0, 20), (3, 40, 5, 60), (0, 3, 0, 100)])
@pytest.mark.parametrize("delta", [0.0, 0.05])
def test_epsilon_is_kairouz_s_with_scipy_s_bounds(k0, n0, k1, n1, delta):
    fpr, fnr = (stats.binomtest(k, n).proportion_ci(0.9, method="exact").high for k, n in ((k0, n0), (k1, n1)))
    ratios = (1 - delta - fpr) / fnr, (1 - delta - fnr) / fpr
    expected = max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0))
    assert epsilon_lower_bound(k0, k1, n0, n1, delta=delta, confidence=0.9) == pytest.approx(expected)
    flipped = epsilon_lower_bound(k1, k0, n1, n0, delta=delta, confidence=0.9)
    assert flipped == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fpr", "fnr"), [(1 / (1 + math.e), 1 / (1 + math.e)), (0.05, 1 - 0.05 * math.e), (0.3, 0.7 / math.e)]
)
def test_the_bound_holds_as_often_as_it_says(fpr, fnr):
    """Rates that ε = 1 just allows: over all outcomes, weighted by their chance, a bound above 1 is rare."""
    n = 25
    assert min(fpr + math.e * fnr, fnr + math.e * fpr) == pytest.approx(1)
    wrong = 0.0
    for k0, k1 in product(range(n + 1), repeat=2):
        if epsilon_lower_bound(k0, k1, n, n) > 1:
            wrong += stats.binom.pmf(k0, n, fpr) * stats.binom.pmf(k1, n, fnr)
    assert 0 < wrong <= 0.05


@pytest.mark.parametrize("n", [1, 4, 5, 6, 10, 37])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.2])
def test_nobody_shows_more_than_the_largest_epsilon(n, delta):
    largest = largest_epsilon(n, delta=delta)
    shown = [epsilon_lower_bound(a, b, n, n, delta=delta) for a, b in product(range(min(n, 6) + 1), repeat=2)]
    assert max(shown) == shown[0] == largest
    assert largest <= largest_epsilon(n, delta=delta, bound="any")
    assert largest_epsilon(n + 1, delta=delta) >= largest


@pytest.mark.parametrize("delta", [0.0, 0.1])
@pytest.mark.parametrize("n", [3, 5, 20])
def test_the_limit_of_any_procedure_is_found_by_a_search(n, delta):
    """The likeliest that n + n right guesses get under ε, over a fine grid of the rates that (ε, δ) allows."""
    epsilon = largest_epsilon(n, delta=delta, bound="any")
    assert epsilon > 0
    a, b = np.meshgrid(np.linspace(0, 1, 2001), np.linspace(0, 1, 2001))
    allowed = (a + math.exp(epsilon) * b >= 1 - delta) & (b + math.exp(epsilon) * a >= 1 - delta)
    chance = ((1 - a) * (1 - b))[allowed].max() ** n
    assert chance == pytest.approx(0.05, rel=0.002 * n)
    assert chance <= 0.05 * (1 + 1e-9)


def test_five_runs_show_nothing_and_ten_a_little():
    assert largest_epsilon(5) == 0 < largest_epsilon(6)
    assert largest_epsilon(10) == pytest.approx(math.log(0.025**0.1 / (1 - 0.025**0.1)))
    assert largest_epsilon(1, delta=0.9, bound="any") == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epsilon_lower_bound(4, 0, 3, 3), "false_positives must be at most runs_without=3, got 4"),
        (lambda: epsilon_lower_bound(0, -1, 3, 3), "false_negatives must be an int of at least 0"),
        (lambda: epsilon_lower_bound(0, 0, 0, 3), "runs_without must be an int of at least 1"),
        (lambda: largest_epsilon(3, delta=1), r"delta must lie in \[0, 1\), got 1"),
        (lambda: largest_epsilon(3, delta=1, bound="any"), r"delta must lie in \[0, 1\), got 1"),
        (lambda: largest_epsilon(3, confidence=1), r"confidence must lie in \(0, 1\), got 1"),
        (lambda: largest_epsilon(3, bound="joint"), "'clopper-pearson', 'any', got 'joint'"),
        (lambda: largest_epsilon(2.0), "runs must be an int of at least 1, got 2.0"),
    ],
)
def test_impossible_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
