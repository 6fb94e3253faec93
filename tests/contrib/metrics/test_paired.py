"""Paired tests against scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from avalanche_amnesia.contrib.metrics import paired_test


@pytest.mark.parametrize("n", [2, 5, 14])
def test_a_paired_test_equals_scipy(n):
    generator = np.random.default_rng(n)
    a, b = generator.random(n), generator.random(n) + 0.1
    test, theirs = paired_test(a.tolist(), b.tolist(), confidence=0.9), stats.ttest_rel(a, b)
    assert (test.n, test.mean_difference) == (n, pytest.approx((a - b).mean()))
    assert test.p_value == pytest.approx(theirs.pvalue)
    assert test.interval == pytest.approx(tuple(theirs.confidence_interval(0.9)))


def test_equal_differences_have_no_interval_whatever_their_last_bits():
    test = paired_test([0.8, 0.9, 0.3], [0.7, 0.8, 0.2])
    assert test.mean_difference == pytest.approx(0.1)
    assert test.interval is test.p_value is None
    assert paired_test([0.5], [0.4]).interval is None


@pytest.mark.parametrize(
    ("first", "second", "options", "message"),
    [
        ([], [], {}, "finite numbers"),
        ([1.0], [1.0, 2.0], {}, r"got \[1.0\] and \[1.0, 2.0\]"),
        ([math.nan], [1.0], {}, "finite numbers"),
        ([1.0], [2.0], {"confidence": 95}, r"in \(0, 1\), got 95"),
    ],
)
def test_lists_that_do_not_pair_are_refused(first, second, options, message):
    with pytest.raises(ValueError, match=message):
        paired_test(first, second, **options)
