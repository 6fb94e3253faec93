"""Distances of features against scipy and naive loops, and overlap of masks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cosine

from avalanche_amnesia.contrib.metrics import mask_overlap
from avalanche_amnesia.contrib.metrics.distances import cka_distance, cosine_distance, euclidean_distance


@st.composite
def pairs(draw):
    n, d = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    entries = st.lists(st.floats(-50, 50), min_size=n * d, max_size=n * d)
    return [torch.tensor(draw(entries)).reshape(n, d) for _ in range(2)]


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_euclidean_and_cosine_equal_the_naive_loop(pair):
    a, b = pair
    x, y = a.double().numpy(), b.double().numpy()
    np.testing.assert_allclose(
        euclidean_distance(a, b), [np.sqrt(((u - v) ** 2).sum()) for u, v in zip(x, y, strict=True)], atol=1e-12
    )
    for u, v, distance in zip(x, y, cosine_distance(a, b).tolist(), strict=True):
        if not u.any() or not v.any():
            assert distance == (0 if not u.any() and not v.any() else 1)
        elif min(np.linalg.norm(u), np.linalg.norm(v)) > 1e-6:
            assert distance == pytest.approx(cosine(u, v), abs=1e-12)
        assert -1e-12 <= distance <= 2 + 1e-12


def naive_cka(a, b):
    """HSIC with linear kernels, centred by the centring matrix: another road to the same number."""
    n = len(a)
    centre = np.eye(n) - 1 / n
    k, m = centre @ a @ a.T @ centre, centre @ b @ b.T @ centre
    return (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())


def test_cka_equals_hsic_and_does_not_see_rotation_scale_and_shift():
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(40, 6)), generator.normal(size=(40, 6))
    ours = cka_distance(torch.tensor(a), torch.tensor(b)).item()
    assert ours == pytest.approx(1 - naive_cka(a, b), abs=1e-12)
    rotation, _ = np.linalg.qr(generator.normal(size=(6, 6)))
    assert cka_distance(torch.tensor(a), torch.tensor(3 * a @ rotation + 7)).item() == pytest.approx(0, abs=1e-12)
    assert cka_distance(torch.zeros(4, 2), torch.ones(4, 2)).item() == 0
    assert cka_distance(torch.zeros(3, 2), torch.tensor([[0.0, 1], [1, 0], [1, 1]])).item() == 1


@pytest.mark.parametrize("function", [euclidean_distance, cosine_distance, cka_distance])
@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((3,), (3,)), ((1, 3), (2, 3))])
def test_shapes_that_do_not_fit_are_refused(function, shapes):
    with pytest.raises(ValueError, match=r"one shape \(n, features\), got"):
        function(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


@pytest.mark.parametrize("function", [euclidean_distance, cosine_distance, cka_distance])
def test_equal_features_are_at_distance_0_to_the_last_bit_and_almost_equal_ones_not_below(function):
    x = torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    assert not function(x, x.clone()).any()
    assert (function(x, x * 3 if function is cka_distance else x * (1 + 1e-7)) >= 0).all()


def test_overlap():
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert mask_overlap(a, b) == pytest.approx(1 / 3)
    assert mask_overlap(a & False, b & False) == 0
