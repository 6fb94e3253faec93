"""SplitDigits and PermutedDigits against scikit-learn's digits: samples, labels, splits, permutations, arguments."""

import pytest
import torch
from sklearn.datasets import load_digits
from support.strategy_state import same

from avalanche_amnesia.benchmarks import PermutedDigits, SplitDigits
from avalanche_amnesia.benchmarks.families import stratified


def rows(*experiences) -> list[tuple[float, ...]]:
    return [tuple(row.tolist()) for e in experiences for row in e.tensors[0].flatten(1)]


def test_split_digits_holds_each_image_once():  # trap 6
    benchmark = SplitDigits()
    all_rows = rows(*benchmark.train_stream, *benchmark.test_stream)
    bunch = load_digits()
    assert sorted(all_rows) == sorted(map(tuple, (bunch.data / 16).tolist()))
    assert [e.original_classes for e in benchmark.train_stream] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert benchmark.train_stream[0].tensors[0].shape[1:] == (1, 8, 8)


def test_labels_belong_to_their_images():
    bunch = load_digits()
    label_of = {tuple(row): label for row, label in zip((bunch.data / 16).tolist(), bunch.target.tolist(), strict=True)}
    for experience in SplitDigits(class_order=[3, 1, 4, 0, 5, 9, 2, 6, 8, 7]).train_stream:
        expected = [experience.original_classes[label] for label in experience.tensors[1].tolist()]
        assert [label_of[row] for row in rows(experience)] == expected


def test_the_train_test_split_is_stratified():
    bunch = load_digits()
    for experience in SplitDigits(n_tasks=10).test_stream:
        available = (bunch.target == experience.original_classes[0]).sum()
        assert abs(len(experience.dataset) - available * 360 / 1797) < 1


REFUSED = [
    *((SplitDigits, {"n_tasks": n}, "allowed are 1, 2, 5, 10") for n in (3, 0, -1, 20, True, 2.5)),
    *((PermutedDigits, {"n_tasks": n}, "an int of at least 1") for n in (0, -2, True, 1.0)),
    *(
        (SplitDigits, {"class_order": order}, "must hold each of the classes")
        for order in ([0, 1], [*range(9), 8], list(range(1, 11)))
    ),
    *(
        (SplitDigits, {name: n}, rf"{name}: {n} samples .* from 10 \(one per class\) to {top}")
        for name, n, top in (("n_train", 1438, 1437), ("n_test", 361, 360), ("n_train", 9, 1437), ("n_test", 20.0, 360))
    ),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_a_wrong_argument_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("make", [SplitDigits, PermutedDigits])
def test_a_stream_depends_only_on_its_seed(make):
    first = make(seed=1, n_train=100, n_test=50)
    torch.manual_seed(77)
    state = torch.get_rng_state()
    again, other = make(seed=1, n_train=100, n_test=50), make(seed=2, n_train=100, n_test=50)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("train", "test"):
        of_first, of_again, of_other = ([e.tensors for e in made.streams[name]] for made in (first, again, other))
        assert same(of_first, of_again)
        assert not same(of_first, of_other)


def test_the_size_of_a_split_subset_counts_the_whole_stream():
    benchmark = SplitDigits(n_train=200, n_test=50)
    full = SplitDigits()
    for name, n in (("train", 200), ("test", 50)):
        assert sum(len(e.dataset) for e in benchmark.streams[name]) == n
        total = sum(len(e.dataset) for e in full.streams[name])
        for part, whole in zip(benchmark.streams[name], full.streams[name], strict=True):
            assert set(rows(part)) <= set(rows(whole))
            for label in (0, 1):
                kept, available = (int((e.tensors[1] == label).sum()) for e in (part, whole))
                assert abs(kept - available * n / total) < 1


def test_permutations_move_the_pixels_one_by_one():
    train = PermutedDigits(4, n_train=30, n_test=10).train_stream
    plain = train[0].tensors[0].flatten(1)
    orders = []
    for experience in list(train)[1:]:
        moved = experience.tensors[0].flatten(1)
        order = experience._samples.transform.steps[0].order.tolist()
        assert sorted(order) == list(range(64))
        for before, after in zip(plain, moved, strict=True):
            assert [float(before[pixel]) for pixel in order] == after.tolist()
        for item in range(5):
            assert torch.equal(experience.dataset[item][0].flatten(), moved[item])
        orders.append(tuple(order))
    assert len({*orders, tuple(range(64))}) == 4


def test_a_permutation_depends_only_on_seed_and_task():
    short, long, other = PermutedDigits(2), PermutedDigits(4, n_train=50), PermutedDigits(2, seed=1)
    orders = [b.train_stream[1]._samples.transform.steps[0].order for b in (short, long, other)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_a_stratified_choice_keeps_the_shares_of_unequal_classes():
    labels = torch.tensor([0] * 70 + [1] * 25 + [2] * 5)
    index = stratified(labels, 20, seed=0, purpose="test")
    assert len(set(index.tolist())) == 20
    assert torch.equal(index, index.sort().values)
    assert labels[index].bincount().tolist() == [14, 5, 1]
