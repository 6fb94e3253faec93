"""Benchmarks of tasks made from tensors, data sets or digits: labels, timelines, lazy reading, splits, arguments."""

from functools import partial

import pytest
import torch
from sklearn.datasets import load_digits
from support.strategy_state import same
from torch.utils.data import Dataset, TensorDataset

from avalanche_amnesia.benchmarks import PermutedDigits, SplitDigits, task_benchmark
from avalanche_amnesia.benchmarks.data import targets_of
from avalanche_amnesia.benchmarks.families import stratified_positions
from avalanche_amnesia.contrib.streams.image_sets import Standardise


def data(n: int = 60, n_classes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, 1, 2, 3, generator=generator), torch.arange(n) % n_classes


class WithTargets(Dataset):
    def __init__(self, x, targets):
        self.x, self.targets, self.read = x, targets, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, item):
        self.read += 1
        return self.x[item], self.targets[item]


def test_labels_follow_the_order_of_each_tasks_classes_in_tensors_and_items():
    x, y = data()
    benchmark = task_benchmark((x, y), (x, y), [[4, 0], [1, 4, 5]], transforms=[None, Standardise(0, 2)])
    for stream in benchmark.streams.values():
        for task, (experience, classes) in enumerate(zip(stream, [[4, 0], [1, 4, 5]], strict=True)):
            task_x, task_y = experience.tensors
            keep = torch.isin(y, torch.tensor(classes))
            assert torch.equal(torch.tensor(classes)[task_y], y[keep])
            assert torch.equal(task_x, x[keep] / (1 + task))
            assert (task_x.dtype, task_y.dtype) == (torch.float32, torch.int64)
            assert experience.original_classes == classes
            for item in range(len(task_x)):
                item_x, item_y, label = experience.dataset[item]
                assert torch.equal(item_x, task_x[item])
                assert (item_y, label) == (int(task_y[item]), task)
                assert type(item_y) is int


def test_the_timeline_has_lists_for_tasks_of_unequal_size():  # traps 2 and 3
    x, y = data()
    stream = task_benchmark((x, y), (x, y), [[0, 1], [2, 3, 4], [5]]).train_stream
    timeline = [
        (e.classes_in_this_experience, e.previous_classes, e.classes_seen_so_far, e.future_classes) for e in stream
    ]
    assert timeline == [
        ([0, 1], [], [0, 1], [0, 1, 2]),
        ([0, 1, 2], [0, 1], [0, 1, 2], [0]),
        ([0], [0, 1, 2], [0, 1, 2], []),
    ]


@pytest.mark.parametrize("lazy", [False, True])
def test_labels_are_found_without_reading_samples(lazy):
    x, y = data()
    given = WithTargets(x, y.tolist()) if lazy else (x, y)
    experience = task_benchmark(given, given, [[4, 0], [1, 4, 5]]).train_stream[1]
    assert targets_of(experience).tolist() == list(experience.dataset.targets)
    assert not lazy or not given.read
    experience._dataset = experience.dataset.subset([7, 2, 3])
    assert targets_of(experience).tolist() == list(experience.dataset.targets)
    assert len(targets_of(experience)) == 3


def test_samples_that_are_not_finite_are_found():
    x = torch.rand(2500, 2, 3)
    x[7], x[1100] = 3e38, -3e38  # their sums overflow
    x[[8, 1030, 2499], 1, 2] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[1031, 0, :2] = torch.tensor([float("inf"), -float("inf")])
    y = torch.arange(2500) % 2
    for experience in task_benchmark((x, y), (x, y), [[0, 1], [1]]).train_stream:
        samples = experience.tensors[0]
        slow = (~samples.flatten(1).isfinite().all(1)).nonzero()[:, 0]
        assert torch.equal(experience.samples.nonfinite_positions(), slow)
        assert len(slow)


@pytest.mark.parametrize("kind", ["list", "tensor", "array", "none"])
def test_data_sets_stay_lazy_and_agree_with_tensors(kind):
    x, y = data()
    made = {"list": y.tolist(), "tensor": y, "array": y.numpy()}
    lazy = TensorDataset(x, y) if kind == "none" else WithTargets(x, made[kind])
    stream = task_benchmark(lazy, lazy, [[3, 1], [2]]).train_stream
    if isinstance(lazy, WithTargets):
        assert lazy.read == 0
    eager = task_benchmark((x, y), (x, y), [[3, 1], [2]]).train_stream
    for ours, reference in zip(stream, eager, strict=True):
        assert ours.tensors is None
        assert list(ours.dataset.targets) == list(reference.dataset.targets)
        for item in range(len(reference.dataset)):
            assert torch.equal(ours.dataset[item][0], reference.dataset[item][0])
            assert ours.dataset[item][1:] == reference.dataset[item][1:]


def test_reading_labels_does_not_move_the_global_random_stream():
    class Augmented(WithTargets):
        def __getitem__(self, item):
            return self.x[item] + torch.rand(()), self.y[item]

    x, y = data()
    augmented = Augmented(x, None)
    augmented.y = y.tolist()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    benchmark = task_benchmark(augmented, augmented, [[0, 1]])
    assert torch.equal(torch.get_rng_state(), state)
    first, second = benchmark.train_stream[0].dataset[0][0], benchmark.train_stream[0].dataset[0][0]
    assert not torch.equal(first, second)


X, Y = data()
PAIR, LAZY = (X, Y), TensorDataset(X, Y)
REFUSED = [  # train data, test data, classes of each task, transforms, words of the message
    (PAIR, PAIR, 2, None, r"task_classes must be a list of classes per task, as .*, got 2"),
    (PAIR, PAIR, [], None, "task_classes is empty"),
    (PAIR, PAIR, [[0], []], None, "task 1 has no classes"),
    (PAIR, PAIR, [[0, 1], [2, 3, 2]], None, r"task 1 repeats the classes \[2\]"),
    (PAIR, PAIR, [[0, 1], [2, 9]], None, r"task 1: no sample of the classes \[9\] in the train data"),
    (PAIR, PAIR, [[0, 1.0]], None, r"task 0: \[1.0\] are no classes"),
    (PAIR, data(n_classes=5), [[0], [5]], None, r"task 1: no sample of the classes \[5\] in the test data"),
    ((X, Y[:-1]), PAIR, [[0, 1]], None, "train: 60 samples but 59 labels"),
    ((X, Y.float()), PAIR, [[0, 1]], None, "give y.long\\(\\) .* not torch.float32"),
    ((X, Y > 2), PAIR, [[0, 1]], None, "not torch.bool of"),
    ((X, Y.unsqueeze(1)), PAIR, [[0, 1]], None, r"torch.int64 of \(60, 1\)"),
    ((X, Y, Y), PAIR, [[0, 1]], None, "a tuple of 3 parts"),
    ((X > 0, Y), PAIR, [[0, 1]], None, "x has dtype torch.bool; give floats, bytes"),
    (WithTargets(X, Y.float().tolist()), PAIR, [[0, 1]], None, "0.0 is no class label"),
    (WithTargets(X, Y.tolist()[:-2]), PAIR, [[0, 1]], None, "60 samples but 58 labels"),
    (WithTargets(X, [True] * 60), PAIR, [[0, 1]], None, "True is no class label"),
    ((X, Y.numpy().astype(str)), PAIR, [[0, 1]], None, "'0'.* is no class label: give ints"),
    (3, PAIR, [[0, 1]], None, "int is no"),
    (PAIR, PAIR, [[0], [1]], [None], r"transforms=\[None\]: give 2 functions of whole batches"),
    (LAZY, LAZY, [[0]], [Standardise(0, 2)], "transforms apply to tensor pairs"),
    (PAIR, PAIR, [[0, 1]], Standardise(0, 2), "give 1 functions of whole batches, or None"),
]
SUBSET = r"{}: {} samples .* give 10 \(one per class\) to {}"
REFUSED = [(partial(task_benchmark, *of, transforms=transforms), words) for *of, transforms, words in REFUSED] + [
    *((partial(SplitDigits, n), "allowed are 1, 2, 5, 10") for n in (3, 0, 20, True)),
    (partial(PermutedDigits, 0), "an int of at least 1"),
    *((partial(SplitDigits, class_order=o), "must hold each of the classes") for o in ([0, 1], [*range(9), 8])),
    *((partial(SplitDigits, n_train=n), SUBSET.format("n_train", n, 1437)) for n in (1438, 9, 20.0)),
    (partial(SplitDigits, n_test=361), SUBSET.format("n_test", 361, 360)),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_wrong_argument_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_target_transform_that_changes_labels_is_refused():
    x, y = data()
    base = WithTargets(x, y.tolist())
    base.target_transform = lambda label: 5 - label
    assert task_benchmark(base, base, [[0, 1]]).n_classes == 2  # its items do not use it
    changed = type("Changed", (WithTargets,), {"__getitem__": lambda self, at: (self.x[at], 5 - self.targets[at])})
    base = changed(x, y.tolist())
    base.target_transform = lambda label: 5 - label
    with pytest.raises(ValueError, match=r"item 0 has the label 5, and targets\[0\] is 0, which no target_transform"):
        task_benchmark(base, base, [[0, 1]])


def rows(*experiences) -> list[tuple[float, ...]]:
    return [tuple(row.tolist()) for e in experiences for row in e.tensors[0].flatten(1)]


def test_split_digits_holds_each_image_once():  # trap 6
    benchmark = SplitDigits()
    all_rows = rows(*benchmark.train_stream, *benchmark.test_stream)
    assert sorted(all_rows) == sorted(map(tuple, (load_digits().data / 16).tolist()))
    assert [e.original_classes for e in benchmark.train_stream] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert benchmark.train_stream[0].tensors[0].shape[1:] == (1, 8, 8)


def test_the_train_test_split_is_stratified():
    bunch = load_digits()
    for experience in SplitDigits(n_tasks=10).test_stream:
        assert abs(len(experience.dataset) - (bunch.target == experience.original_classes[0]).sum() * 360 / 1797) < 1


@pytest.mark.parametrize("make", [SplitDigits, PermutedDigits])
def test_a_stream_depends_only_on_its_seed(make):
    first = make(seed=1, n_train=100, n_test=50)
    torch.manual_seed(77)
    state = torch.get_rng_state()
    again, other = make(seed=1, n_train=100, n_test=50), make(seed=2, n_train=100, n_test=50)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("train", "test"):
        from_first, of_again, of_other = ([e.tensors for e in made.streams[name]] for made in (first, again, other))
        assert same(from_first, of_again)
        assert not same(from_first, of_other)


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
    index = stratified_positions(labels, 20, seed=0, purpose="test")
    assert len(set(index.tolist())) == 20
    assert torch.equal(index, index.sort().values)
    assert labels[index].bincount().tolist() == [14, 5, 1]
