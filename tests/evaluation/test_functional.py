"""Pure functions of metrics against scipy, scikit-learn, loops and their bounds."""

import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import cosine, jensenshannon
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.benchmarks.families import draw_positions
from avalanche_amnesia.contrib.metrics import paired_test
from avalanche_amnesia.contrib.metrics.distances import cka_distance, cosine_distance, euclidean_distance
from avalanche_amnesia.contrib.metrics.mask_use import MAX_LAYERS, mask_overlap, masks_figure, owners
from avalanche_amnesia.contrib.metrics.membership import membership_auc
from avalanche_amnesia.contrib.metrics.relapse import few_shot_accuracy, linear_probe_accuracy
from avalanche_amnesia.evaluation import floor_ratio, js_divergence
from avalanche_amnesia.evaluation.functional import accuracy

numbers = st.one_of(st.floats(-30, 30), st.sampled_from([0.0, 1e4, -1e4, 700.0, -745.0, 1e30, -1e30, 3e38]))


@st.composite
def pairs(draw, numbers):
    n, d = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    return [torch.tensor(draw(st.lists(numbers, min_size=n * d, max_size=n * d))).reshape(n, d) for _ in range(2)]


@settings(max_examples=100, deadline=None)
@given(pairs(numbers))
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


def test_floor_ratio_is_none_if_the_distance_or_the_floor_is_only_rounding():
    assert floor_ratio(0.3, 0.2) == pytest.approx(1.5)
    assert [floor_ratio(*pair) for pair in ((0.0, 0.2), (0.9e-9, 0.2), (0.0, 0.0), (0.3, 0.9e-9))] == [None] * 4
    assert floor_ratio(1e-9, 1e-9) == 1


losses = st.lists(st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e30)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(losses, losses)
def test_auc_equals_that_of_scikit_learn_including_ties(members, others):
    ours = membership_auc(torch.tensor(members, dtype=torch.float64), torch.tensor(others, dtype=torch.float64))
    labels = [1] * len(members) + [0] * len(others)
    assert ours == pytest.approx(roc_auc_score(labels, -np.array(members + others)), abs=1e-12)


def test_auc_reaches_both_ends_and_accepts_infinite_losses():
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([0.3, math.inf])
    assert (membership_auc(low, high), membership_auc(high, low), membership_auc(low, low)) == (1, 0, 0.5)
    assert membership_auc(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0.5


@cache
def digits():
    """Return all ten digits, flat: training and test data."""
    found = []
    for stream in (SplitDigits().train_stream, SplitDigits().test_stream):
        x, y = (torch.cat(parts) for parts in zip(*(e.tensors for e in stream), strict=True))
        task = torch.cat([torch.full((len(e.dataset),), i) for i, e in enumerate(stream)])
        found += [x.flatten(1), y + 2 * task * (y < 2)]
    return found


def test_a_linear_probe_equals_scikit_learn_on_whitened_features():
    penalty = 100.0
    x, y, test_x, test_y = digits()
    chosen, pixels = torch.arange(0, len(x), 4), [10, 20, 21, 28, 34, 42, 43, 53]
    few, labels, test = x[chosen][:, pixels].double().numpy(), y[chosen], test_x[:, pixels].double().numpy()
    values, directions = np.linalg.eigh(np.cov(few.T, bias=True))
    whitening = directions / np.sqrt(values)  # up to a rotation, which the penalty does not see
    theirs = LogisticRegression(C=1 / penalty, max_iter=1000, tol=1e-8).fit(few @ whitening, labels)
    ours = linear_probe_accuracy(torch.tensor(few), labels, torch.tensor(test), test_y, penalty=penalty)
    assert ours == pytest.approx(theirs.score(test @ whitening, test_y), abs=3 / len(test_y))
    assert 0.5 < ours < 0.95


def few_shots(labels, shots, seed):
    """Return the positions of a few samples of every class."""
    return draw_positions(labels, dict.fromkeys(labels.unique().tolist(), shots), seed)


def test_shots_are_drawn_per_class_from_the_seed_alone():
    labels = torch.tensor([2, 0, 2, 2, 0, 2, 5, 2])
    shots = few_shots(labels, 2, 3)
    assert labels[shots].bincount().tolist() == [2, 0, 2, 0, 0, 1]
    assert shots.tolist() == sorted(set(shots.tolist()))
    torch.manual_seed(1)
    assert torch.equal(few_shots(labels, 2, 3), shots)
    assert len({tuple(few_shots(labels, 2, seed).tolist()) for seed in range(20)}) > 3
    assert few_shots(labels, 9, 0).tolist() == list(range(8))


def test_a_head_of_few_shots_equals_scikit_learn():
    penalty = 1e-2
    x, y, test_x, test_y = digits()
    few = few_shots(y, 5, 1)
    centred, centred_test = (part.double().numpy() - x[few].double().mean(0).numpy() for part in (x[few], test_x))
    scale = np.sqrt((centred**2).mean())
    ours = few_shot_accuracy(x[few], y[few], test_x, test_y, penalty=penalty)
    theirs = LogisticRegression(C=1 / (penalty * len(few)), fit_intercept=False, max_iter=1000, tol=1e-8)
    theirs.fit(np.pad(centred / scale, ((0, 0), (0, 1)), constant_values=1), y[few])
    padded = np.pad(centred_test / scale, ((0, 0), (0, 1)), constant_values=1)
    assert ours == pytest.approx(theirs.score(padded, test_y), abs=3 / len(test_y))
    small = few_shot_accuracy(1e-6 * x[few], y[few], 1e-6 * test_x, test_y, penalty=penalty)
    assert small == pytest.approx(ours, abs=0.01)


def test_equal_features_read_the_most_frequent_class():
    one, labels = torch.ones(1, 3), torch.tensor([1])
    assert linear_probe_accuracy(one, labels, torch.randn(4, 3), torch.tensor([1, 1, 1, 0])) == 0.75
    assert linear_probe_accuracy(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64), one, torch.tensor([0])) == 1
    dead, y = torch.zeros(30, 4), torch.arange(30) % 3 % 2  # class 0 is the more frequent one
    for read in (linear_probe_accuracy, few_shot_accuracy):
        assert read(dead, y, dead, y) == pytest.approx(2 / 3)


@st.composite
def some_masks(draw):
    n, tasks = draw(st.integers(1, 7)), draw(st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True))
    return {task: torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))) for task in tasks}


def jaccard(a, b):
    """Intersection over union of the positions of two masks."""
    a, b = ({i for i, used in enumerate(mask.tolist()) if used} for mask in (a, b))
    return len(a & b) / len(a | b) if a | b else 0.0


@settings(max_examples=40, deadline=None)
@given(some_masks())
def test_overlap_is_the_jaccard_index(masks):
    for a, b in product(masks.values(), repeat=2):
        assert mask_overlap(a, b) == pytest.approx(jaccard(a, b))


@settings(max_examples=40, deadline=None)
@given(some_masks())
def test_owners_equal_a_count_unit_by_unit(masks):
    n = len(next(iter(masks.values())))
    counted = dict.fromkeys(["free", "shared", *map(str, masks)], 0)
    for unit in range(n):
        users = [task for task, mask in masks.items() if mask[unit]]
        counted["free" if not users else str(users[0]) if len(users) == 1 else "shared"] += 1
    assert owners(masks) == {owner: count / n for owner, count in counted.items()}
    assert sum(owners(masks).values()) == pytest.approx(1)


@settings(max_examples=60, deadline=None)
@given(pairs(st.floats(-50, 50)))
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
    assert cka_distance(torch.tensor(a), torch.tensor(b)).item() == pytest.approx(1 - naive_cka(a, b), abs=1e-12)
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


LOW, OPEN = torch.tensor([0.1]), torch.ones(3, dtype=torch.bool)
REFUSED = [
    (lambda: js_divergence(torch.zeros(2, 3), torch.zeros(2, 4)), r"one shape \(n, features\), got"),
    (lambda: js_divergence(torch.zeros(3), torch.zeros(3)), r"one shape \(n, features\), got"),
    (lambda: js_divergence(torch.zeros(1, 3), torch.zeros(2, 3)), r"one shape \(n, features\), got"),
    (lambda: euclidean_distance(torch.zeros(2, 3), torch.zeros(2, 4)), r"one shape \(n, features\), got"),
    (lambda: cosine_distance(torch.zeros(3), torch.zeros(3)), r"one shape \(n, features\), got"),
    (lambda: cka_distance(torch.zeros(1, 3), torch.zeros(2, 3)), r"one shape \(n, features\), got"),
    (lambda: paired_test([], []), "finite numbers"),
    (lambda: paired_test([1.0], [1.0, 2.0]), r"got \[1.0\] and \[1.0, 2.0\]"),
    (lambda: paired_test([math.nan], [1.0]), "finite numbers"),
    (lambda: paired_test([1.0], [2.0], confidence=95), r"in \(0, 1\), got 95"),
    (lambda: floor_ratio(-0.1, 0.2), "are at least 0, got"),
    (lambda: floor_ratio(0.1, -0.2), "are at least 0, got"),
    (lambda: accuracy(torch.zeros(4, 2), torch.tensor([1])), "as many logits as labels"),
    (lambda: accuracy(torch.zeros(0, 2), torch.tensor([])), "as many logits as labels"),
    *((lambda bad=bad: membership_auc(LOW, bad), "other_losses must be") for bad in (LOW[:0], LOW / 0 * 0, LOW[None])),
    (lambda: membership_auc(LOW[:0], LOW), "member_losses must be"),
    (lambda: linear_probe_accuracy(LOW[None], OPEN[:1].long(), LOW[None], OPEN[:1].long(), penalty=0), "above 0"),
]


def test_values_that_do_not_fit_are_refused():
    for call, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            call()
