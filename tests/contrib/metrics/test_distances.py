"""Distances of features, overlap of masks, paired tests and pictures of masks against scipy and loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import cosine

from avalanche_amnesia.contrib.metrics import paired_test
from avalanche_amnesia.contrib.metrics.distances import cka_distance, cosine_distance, euclidean_distance
from avalanche_amnesia.contrib.metrics.mask_use import MAX_LAYERS, masks_figure


@st.composite
def pairs(draw):
    n, d = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    entries = st.lists(st.floats(-50, 50), min_size=n * d, max_size=n * d)
    return [torch.tensor(draw(entries)).reshape(n, d) for _ in range(2)]


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_euclidean_and_cosine_distances_equal_a_loop(pair):
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
    """Return the centred HSIC with linear kernels."""
    n = len(a)
    centre = np.eye(n) - 1 / n
    k, m = centre @ a @ a.T @ centre, centre @ b @ b.T @ centre
    return (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())


def test_cka_equals_hsic_and_ignores_rotation_scale_and_shift():
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(40, 6)), generator.normal(size=(40, 6))
    ours = cka_distance(torch.tensor(a), torch.tensor(b)).item()
    assert ours == pytest.approx(1 - naive_cka(a, b), abs=1e-12)
    rotation, _ = np.linalg.qr(generator.normal(size=(6, 6)))
    assert cka_distance(torch.tensor(a), torch.tensor(3 * a @ rotation + 7)).item() == pytest.approx(0, abs=1e-12)
    assert cka_distance(torch.zeros(4, 2), torch.ones(4, 2)).item() == 0
    assert cka_distance(torch.zeros(3, 2), torch.tensor([[0.0, 1], [1, 0], [1, 1]])).item() == 1


@pytest.mark.parametrize("function", [euclidean_distance, cosine_distance, cka_distance])
def test_equal_features_have_distance_0_exactly_and_similar_ones_none_below_0(function):
    x = torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    assert not function(x, x.clone()).any()
    assert (function(x, x * 3 if function is cka_distance else x * (1 + 1e-7)) >= 0).all()


@pytest.mark.parametrize("n", [2, 14])
def test_a_paired_test_equals_that_of_scipy(n):
    generator = np.random.default_rng(n)
    a, b = generator.random(n), generator.random(n) + 0.1
    test, theirs = paired_test(a.tolist(), b.tolist(), confidence=0.9), stats.ttest_rel(a, b)
    assert (test.n, test.mean_difference) == (n, pytest.approx((a - b).mean()))
    assert test.p_value == pytest.approx(theirs.pvalue)
    assert test.interval == pytest.approx(tuple(theirs.confidence_interval(0.9)))


def test_equal_differences_have_no_interval_despite_rounding():
    test = paired_test([0.8, 0.9, 0.3], [0.7, 0.8, 0.2])
    assert test.mean_difference == pytest.approx(0.1)
    assert test.interval is test.p_value is None
    assert paired_test([0.5], [0.4]).interval is None


def test_a_figure_of_masks_has_a_panel_for_each_layer_up_to_a_limit():
    masks = {4: {"a": torch.tensor([0.0, 0.5, 1.0]), "b": torch.ones(2)}, 1: {"a": torch.zeros(3), "b": torch.ones(2)}}
    panels = masks_figure(masks).axes
    assert [ax.get_title("left") for ax in panels] == [
        "a: 3 entries, 0% shared by several tasks",
        "b: 2 entries, 100% shared by several tasks",
    ]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["task 4: 50%", "task 1: 0%"]
    assert panels[0].images[0].get_array().tolist() == [[0.0, 0.5, 1.0], [0.0, 0.0, 0.0]]
    wide = torch.zeros(4096, requires_grad=True)
    with torch.no_grad():
        wide[::2] = 1
    (panel,) = masks_figure({0: {"a": wide}}).axes
    assert panel.images[0].get_array().tolist() == [[0.5] * 1024]  # a wide layer shows means
    titles = [ax.get_title("left") for ax in masks_figure({0: {f"l{i}": torch.ones(2) for i in range(100)}}).axes]
    assert (len(titles), titles[0][:3], titles[-1][:4]) == (MAX_LAYERS, "l0:", "l99:")
    assert masks_figure({}).axes == []


REFUSED = [
    (lambda: euclidean_distance(torch.zeros(2, 3), torch.zeros(2, 4)), r"one shape \(n, features\), got"),
    (lambda: cosine_distance(torch.zeros(3), torch.zeros(3)), r"one shape \(n, features\), got"),
    (lambda: cka_distance(torch.zeros(1, 3), torch.zeros(2, 3)), r"one shape \(n, features\), got"),
    (lambda: paired_test([], []), "finite numbers"),
    (lambda: paired_test([1.0], [1.0, 2.0]), r"got \[1.0\] and \[1.0, 2.0\]"),
    (lambda: paired_test([math.nan], [1.0]), "finite numbers"),
    (lambda: paired_test([1.0], [2.0], confidence=95), r"in \(0, 1\), got 95"),
]


def test_values_that_do_not_fit_are_refused():
    for call, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            call()
