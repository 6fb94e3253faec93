"""Pure functions of the core against scipy, loops and their bounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax

from avalanche_amnesia.evaluation import floor_ratio, js_divergence
from avalanche_amnesia.evaluation.functional import accuracy

numbers = st.one_of(st.floats(-30, 30), st.sampled_from([0.0, 1e4, -1e4, 700.0, -745.0, 1e30, -1e30, 3e38]))


@st.composite
def pairs(draw):
    n, d = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    return [torch.tensor(draw(st.lists(numbers, min_size=n * d, max_size=n * d))).reshape(n, d) for _ in range(2)]


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_js_divergence_equals_that_of_scipy(pair):
    a, b = pair
    ours = js_divergence(a, b)
    p, q = (softmax(x.double().numpy(), axis=1) for x in (a, b))
    p, q = (np.where(x < 1e-300, 0, x) for x in (p, q))  # scipy divides by denormal numbers
    with np.errstate(invalid="ignore"):  # scipy takes the root of -1e-17
        theirs = np.nan_to_num(jensenshannon(p, q, axis=1, base=2) ** 2)
    assert ours.dtype == torch.float64
    assert np.abs(ours.numpy() - theirs).max() < 1e-12
    assert ((ours >= 0) & (ours <= 1)).all()
    torch.testing.assert_close(ours, js_divergence(b, a), rtol=0, atol=1e-15)
    assert (js_divergence(a, a) == 0).all()


def test_js_divergence_reaches_both_ends_and_depends_on_the_scale():
    a, b = torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]])
    assert js_divergence(a, b).item() == 1
    x, y = torch.tensor([[1.0, 0.5]]), torch.tensor([[0.5, 1.0]])
    assert js_divergence(3 * x, 3 * y) > 2 * js_divergence(x, y) > 0
    assert js_divergence(x + 5, y).item() == pytest.approx(js_divergence(x, y).item(), abs=1e-15)  # a softmax shift


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (130, 1000), (2, 40_000)])
def test_js_divergence_of_a_batch_is_that_of_each_sample(shape):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    one_by_one = [js_divergence(a[i : i + 1], b[i : i + 1]) for i in range(shape[0])]
    assert torch.equal(js_divergence(a, b), torch.cat([torch.empty(0, dtype=torch.float64), *one_by_one]))


def test_equal_features_have_distance_0_exactly_and_similar_ones_none_below_0():
    x = torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    assert not js_divergence(x, x.clone()).any()
    assert (js_divergence(x, x * (1 + 1e-7)) >= 0).all()


def test_floor_ratio_is_none_if_the_distance_or_the_floor_is_only_rounding():
    assert floor_ratio(0.3, 0.2) == pytest.approx(1.5)
    assert [floor_ratio(*pair) for pair in ((0.0, 0.2), (0.9e-9, 0.2), (0.0, 0.0), (0.3, 0.9e-9))] == [None] * 4
    assert floor_ratio(1e-9, 1e-9) == 1


REFUSED = [
    (lambda: js_divergence(torch.zeros(2, 3), torch.zeros(2, 4)), r"one shape \(n, features\), got"),
    (lambda: js_divergence(torch.zeros(3), torch.zeros(3)), r"one shape \(n, features\), got"),
    (lambda: js_divergence(torch.zeros(1, 3), torch.zeros(2, 3)), r"one shape \(n, features\), got"),
    (lambda: floor_ratio(-0.1, 0.2), "are at least 0, got"),
    (lambda: floor_ratio(0.1, -0.2), "are at least 0, got"),
    (lambda: accuracy(torch.zeros(4, 2), torch.tensor([1])), "as many logits as labels"),
    (lambda: accuracy(torch.zeros(0, 2), torch.tensor([])), "as many logits as labels"),
]


def test_values_that_do_not_fit_are_refused():
    for call, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            call()
