"""Pure functions of metrics against scipy, scikit-learn, loops and their bounds."""

import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.benchmarks.families import drawn
from avalanche_amnesia.contrib.metrics.mask_use import mask_overlap, owners
from avalanche_amnesia.contrib.metrics.membership import membership_auc
from avalanche_amnesia.contrib.metrics.relapse import few_shot_accuracy, linear_probe_accuracy
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
    return drawn(labels, dict.fromkeys(labels.unique().tolist(), shots), seed)


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


LOW, OPEN = torch.tensor([0.1]), torch.ones(3, dtype=torch.bool)
REFUSED = [
    (lambda: js_divergence(torch.zeros(2, 3), torch.zeros(2, 4)), r"one shape \(n, features\), got"),
    (lambda: js_divergence(torch.zeros(3), torch.zeros(3)), r"one shape \(n, features\), got"),
    (lambda: js_divergence(torch.zeros(1, 3), torch.zeros(2, 3)), r"one shape \(n, features\), got"),
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
