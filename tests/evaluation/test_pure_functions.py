"""AUC of losses, linear probes, overlap, owners and cost against scikit-learn, naive loops and their edges."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.contrib.metrics.mask_use import mean_overlap, overlap_matrix, owners
from avalanche_amnesia.contrib.metrics.membership import membership_auc
from avalanche_amnesia.contrib.metrics.relapse import few_shot_accuracy, few_shots, linear_probe_accuracy

losses = st.lists(st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e30)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(losses, losses)
def test_auc_is_scikit_learn_s_ties_included(members, others):
    ours = membership_auc(torch.tensor(members, dtype=torch.float64), torch.tensor(others, dtype=torch.float64))
    labels = [1] * len(members) + [0] * len(others)
    assert ours == pytest.approx(roc_auc_score(labels, -np.array(members + others)), abs=1e-12)
    naive = np.mean([[1.0 if m < o else 0.5 if m == o else 0.0 for o in others] for m in members])
    assert ours == pytest.approx(naive, abs=1e-12)


def test_auc_at_its_ends():
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([0.3, math.inf])
    assert (membership_auc(low, high), membership_auc(high, low), membership_auc(low, low)) == (1, 0, 0.5)
    assert membership_auc(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0.5
    for wrong in (torch.tensor([]), torch.tensor([math.nan]), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="other_losses must be"):
            membership_auc(low, wrong)
        with pytest.raises(ValueError, match="member_losses must be"):
            membership_auc(wrong, low)


def digits():
    """All ten digits, flat: train, test."""
    benchmark = SplitDigits()
    (x, y), (test_x, test_y) = (
        [torch.cat(parts) for parts in zip(*(e.tensors for e in stream), strict=True)]
        for stream in (benchmark.train_stream, benchmark.test_stream)
    )
    task, test_task = (
        torch.cat([torch.full((len(e.dataset),), i) for i, e in enumerate(stream)])
        for stream in (benchmark.train_stream, benchmark.test_stream)
    )
    return x.flatten(1), y + 2 * task * (y < 2), test_x.flatten(1), test_y + 2 * test_task * (test_y < 2)


@pytest.mark.parametrize("penalty", [1.0, 100.0])
def test_a_linear_probe_is_scikit_learn_s_on_whitened_features(penalty):
    x, y, test_x, test_y = digits()
    chosen, pixels = torch.arange(0, len(x), 4), [10, 20, 21, 28, 34, 42, 43, 53]
    few, labels, test = x[chosen][:, pixels].double().numpy(), y[chosen], test_x[:, pixels].double().numpy()
    values, directions = np.linalg.eigh(np.cov(few.T, bias=True))
    whitening = directions / np.sqrt(values)  # up to a rotation, which the penalty does not see
    theirs = LogisticRegression(C=1 / penalty, max_iter=1000, tol=1e-8).fit(few @ whitening, labels)
    ours = linear_probe_accuracy(torch.tensor(few), labels, torch.tensor(test), test_y, penalty=penalty)
    assert ours == pytest.approx(theirs.score(test @ whitening, test_y), abs=3 / len(test_y))
    assert 0.5 < ours < 0.95


def test_a_linear_probe_reads_digits_and_no_shuffled_labels():
    x, y, test_x, test_y = digits()
    ours = linear_probe_accuracy(x, y, test_x, test_y)
    assert ours > 0.93
    assert linear_probe_accuracy(x, y, test_x, test_y) == ours  # nothing is drawn
    assert linear_probe_accuracy(1e-6 * x, y, 1e-6 * test_x, test_y) == pytest.approx(ours, abs=0.01)  # no scale
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    assert linear_probe_accuracy(x, shuffled, test_x, test_y) < 0.25


def test_shots_are_so_many_per_class_and_the_seed_s_alone():
    labels = torch.tensor([2, 0, 2, 2, 0, 2, 5, 2])
    drawn = few_shots(labels, 2, 3)
    assert labels[drawn].bincount().tolist() == [2, 0, 2, 0, 0, 1]
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    torch.manual_seed(1)
    assert torch.equal(few_shots(labels, 2, 3), drawn)
    assert len({tuple(few_shots(labels, 2, seed).tolist()) for seed in range(20)}) > 3
    assert few_shots(labels, 9, 0).tolist() == list(range(8))
    with pytest.raises(ValueError, match="shots must be an int of at least 1, got 0"):
        few_shots(labels, 0, 0)


def test_few_shots_read_features_that_know_the_classes():
    x, y, test_x, test_y = digits()
    read = [few_shot_accuracy(x[few], y[few], test_x, test_y) for few in (few_shots(y, n, 0) for n in (1, 5, 50))]
    assert 0.5 < read[0] < read[1] < read[2]
    five = few_shots(y, 5, 0)
    assert read[1] > 0.75 > linear_probe_accuracy(x[five], y[five], test_x, test_y)  # whitened, fewer than pixels
    assert few_shot_accuracy(1e-6 * x[five], y[five], 1e-6 * test_x, test_y) == pytest.approx(read[1], abs=0.01)


@pytest.mark.parametrize("penalty", [1e-2, 1.0])
def test_a_head_of_few_shots_is_scikit_learn_s(penalty):
    x, y, test_x, test_y = digits()
    few = few_shots(y, 5, 1)
    centred, centred_test = (part.double().numpy() - x[few].double().mean(0).numpy() for part in (x[few], test_x))
    scale = np.sqrt((centred**2).mean())
    ours = few_shot_accuracy(x[few], y[few], test_x, test_y, penalty=penalty)
    theirs = LogisticRegression(C=1 / (penalty * len(few)), fit_intercept=False, max_iter=1000, tol=1e-8)
    theirs.fit(np.pad(centred / scale, ((0, 0), (0, 1)), constant_values=1), y[few])
    padded = np.pad(centred_test / scale, ((0, 0), (0, 1)), constant_values=1)
    assert ours == pytest.approx(theirs.score(padded, test_y), abs=3 / len(test_y))


def test_few_shots_of_features_that_are_all_equal_tell_nothing():
    same, y = torch.ones(6, 3), torch.tensor([0, 1, 1, 1, 0, 1])
    assert few_shot_accuracy(same, y, same, y) == pytest.approx(4 / 6)  # the most frequent class
    with pytest.raises(ValueError, match="test_features must be finite"):
        few_shot_accuracy(same, y, same * math.nan, y)


def test_a_linear_probe_of_little_data_and_dead_features():
    one, labels = torch.ones(1, 3), torch.tensor([1])
    assert linear_probe_accuracy(one, labels, torch.randn(4, 3), torch.tensor([1, 1, 1, 0])) == 0.75
    assert linear_probe_accuracy(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64), one, torch.tensor([0])) == 1
    dead, y = torch.zeros(30, 4), torch.arange(30) % 3 % 2  # class 0 is the more frequent one
    assert linear_probe_accuracy(dead, y, dead, y) == pytest.approx(2 / 3)
    for broken in (math.nan, math.inf):
        with pytest.raises(ValueError, match="train_features must be finite"):
            linear_probe_accuracy(torch.full((3, 2), broken), y[:3], torch.ones(1, 2), y[:1])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 2), (4,), (1, 2), (1,)), r"train_labels \(n,\), n ≥ 1, got \(3, 2\) and \(4,\)"),
        (((3,), (3,), (1, 2), (1,)), "train_features"),
        (((3, 2), (3,), (0, 2), (0,)), "test_features"),
    ],
)
def test_features_and_labels_that_do_not_fit_are_refused(shapes, message):
    x, y, test_x, test_y = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        linear_probe_accuracy(x, y.long(), test_x, test_y.long())
    with pytest.raises(ValueError, match="penalty must be above 0"):
        linear_probe_accuracy(x, y.long(), test_x, test_y.long(), penalty=0)


@st.composite
def some_masks(draw, least=1):
    n, tasks = draw(st.integers(1, 7)), draw(st.lists(st.integers(0, 20), min_size=least, max_size=5, unique=True))
    return {task: torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))) for task in tasks}


def jaccard(a, b):
    """Intersection over union of the positions of two masks."""
    a, b = ({i for i, used in enumerate(mask.tolist()) if used} for mask in (a, b))
    return len(a & b) / len(a | b) if a | b else 0.0


@settings(max_examples=40, deadline=None)
@given(some_masks(least=0))
def test_overlaps_are_jaccard_s_index(masks):
    matrix, rows = overlap_matrix(masks), list(masks.values())
    assert (tuple(matrix.shape), matrix.dtype) == ((len(rows), len(rows)), torch.float64)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            assert matrix[i, j].item() == pytest.approx(jaccard(a, b))
    pairs = [jaccard(a, b) for a, b in combinations(rows, 2)]
    assert mean_overlap(matrix) == (pytest.approx(np.mean(pairs)) if pairs else None)


@settings(max_examples=40, deadline=None)
@given(some_masks())
def test_owners_are_counted_one_unit_after_the_other(masks):
    n = len(next(iter(masks.values())))
    counted = dict.fromkeys(["free", "shared", *map(str, masks)], 0)
    for unit in range(n):
        users = [task for task, mask in masks.items() if mask[unit]]
        counted["free" if not users else str(users[0]) if len(users) == 1 else "shared"] += 1
    assert owners(masks) == {owner: count / n for owner, count in counted.items()}
    assert sum(owners(masks).values()) == pytest.approx(1)


def test_a_layer_without_tasks_is_free():
    assert owners({}) == {"free": 1.0, "shared": 0.0}


@pytest.mark.parametrize("function", [owners, overlap_matrix])
@pytest.mark.parametrize(
    "masks",
    [
        {0: torch.ones(3)},
        {0: torch.ones(3, dtype=torch.bool), 1: torch.ones(4, dtype=torch.bool)},
        {0: torch.ones(3, 1, dtype=torch.bool)},
    ],
    ids=["soft", "lengths", "matrix"],
)
def test_masks_of_no_one_shape_are_refused(function, masks):
    with pytest.raises(ValueError, match="masks must be bool tensors of one shape"):
        function(masks)


def test_an_empty_mask_owns_nothing_and_no_layer_is_empty():
    assert owners({0: torch.zeros(2, dtype=torch.bool)}) == {"free": 1, "shared": 0, "0": 0}
    with pytest.raises(ValueError, match="n > 0"):
        owners({0: torch.zeros(0, dtype=torch.bool)})
