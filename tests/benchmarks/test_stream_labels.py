"""Streams of Avalanche's builders are identified or refused."""

import warnings

import pytest
import torch
from avalanche import benchmarks
from avalanche.benchmarks.utils import (
    AvalancheDataset,
    DataAttribute,
    TaskAwareSupervisedClassificationDataset,
    TaskLabels,
    as_classification_dataset,
)
from avalanche.training import Naive
from support import tiny
from support.strategies import make, stock
from support.strategy_state import bits, unchanged, unlearning_plugin
from torch.utils.data import TensorDataset

from avalanche_amnesia import MultiHeadModel, TaskError, with_unlearning
from avalanche_amnesia.models import UnknownTaskError


def of_sets(*sets):
    """Avalanche's basic builder, without task labels."""
    return benchmarks.benchmark_from_datasets(
        train=[as_classification_dataset(one) for one in sets], test=[as_classification_dataset(one) for one in sets]
    )


def domains():
    return of_sets(tiny.data(16), tiny.data(24), tiny.data(32))


def new_classes():
    sets = {name: as_classification_dataset(tiny.data(classes=4)) for name in ("train", "test")}
    return benchmarks.class_incremental_benchmark(sets, num_experiences=2, class_order=[0, 1, 2, 3])


def mixed():
    data = tiny.data()
    labels = [DataAttribute(data.targets, "targets"), TaskLabels([i % 2 for i in range(len(data))])]
    part = TaskAwareSupervisedClassificationDataset([data], data_attributes=labels)
    return benchmarks.with_task_labels(benchmarks.benchmark_from_datasets(train=[part, part], test=[part, part]))


def zero_labels(make):
    return make(tiny.data(classes=4), tiny.data(classes=4), 2, task_labels=False, seed=0)


def unlabelled():
    """A task whose list of labels is empty."""
    benchmark = tiny.tasks()
    benchmark.train_stream[0].task_labels = []
    return benchmark


MEND = r"task_incremental_benchmark\(benchmark, reset_task_labels=True\)"
REFUSED = {
    "new classes": (new_classes, "2 experiences of this stream have no task labels. .*" + MEND),
    "own classes": (lambda: of_sets(tiny.data(), tiny.data(first=2)), "no task labels. .*" + MEND),
    "all zero, classes": (lambda: zero_labels(benchmarks.nc_benchmark), "2 experiences .* that task label.*" + MEND),
    "all zero, samples": (lambda: zero_labels(benchmarks.ni_benchmark), "2 experiences .* that task label.*" + MEND),
    "new samples": (
        lambda: benchmarks.new_instances_benchmark(*(as_classification_dataset(tiny.data()) for _ in "ab"), 2),
        "2 experiences of this stream have no task labels. .*" + MEND,
    ),
    "mixed": (mixed, r"exactly one task, got task labels \[0, 1\].*" + MEND),
    "empty": (unlabelled, r"must have a task label, got task labels \[\].*" + MEND),
    "no labels": (
        lambda: benchmarks.benchmark_from_datasets(train=[AvalancheDataset([TensorDataset(torch.zeros(2, 8))])]),
        r"experience 0 has no targets.*as_classification_dataset\(data\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_stream_without_usable_task_labels_is_refused_before_training(name):
    make, message = REFUSED[name]
    strategy, stream = tiny.strategy("pools" if name == "mixed" else "amnesiac"), make().train_stream
    before = bits(strategy.model)
    for ask in (strategy.eval, strategy.train, lambda given: strategy.train([*given][0])):  # noqa: RUF015
        with pytest.raises(TaskError, match=message):
            ask(stream)
    assert strategy.model.tasks == ()
    assert bits(strategy.model) == before
    strategy.train(tiny.tasks().train_stream[0])
    assert strategy.model.tasks == (0,)


@pytest.mark.parametrize("name", ["all zero, classes", "new classes", "mixed"])
def test_a_stock_strategy_with_our_plugin_refuses_it_too(name):
    strategy = stock(epochs=1, model=MultiHeadModel(tiny.Net()), train_mb_size=8)
    with unchanged(lambda: bits(strategy.model)), pytest.raises(TaskError, match=MEND):
        strategy.train(REFUSED[name][0]().train_stream[0])
    strategy.train(tiny.tasks().train_stream[0])
    assert unlearning_plugin(strategy).ledger.remaining == (0,)


def test_a_stock_strategy_without_our_plugins_refuses_it_too():
    strategy = make(Naive, net=tiny.Net, optimizer="sgd", train_mb_size=8)
    with pytest.raises(UnknownTaskError, match="an experience has no task labels.*" + MEND):
        strategy.train(domains().train_stream[0])
    assert strategy.model.tasks == ()


@pytest.mark.parametrize("name", ["new classes", "own classes", "all zero, classes", "mixed"])
def test_the_suggested_call_repairs_the_stream(name):
    benchmark = benchmarks.task_incremental_benchmark(REFUSED[name][0](), reset_task_labels=True)
    strategy = tiny.strategy()
    strategy.train(benchmark.train_stream)
    strategy.eval(benchmark.test_stream)
    assert strategy.model.tasks == (0, 1)


@pytest.mark.parametrize("split", [False, True])
def test_positions_are_the_tasks_of_a_stream_without_labels_and_one_warning_names_this(split):
    benchmark = benchmarks.benchmark_with_validation_stream(domains(), 0.25) if split else domains()
    strategy, expected = tiny.strategy(), tiny.strategy()
    with pytest.warns(UserWarning, match="no task labels: each of its 3 experiences is taken as the task of its place"):
        strategy.train(benchmark.train_stream[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        strategy.train(benchmark.train_stream[1:], eval_streams=[benchmark.test_stream[:2]])
        strategy.eval(benchmark.test_stream)
        strategy.unlearn([1])
    expected.train(benchmarks.task_incremental_benchmark(benchmark).train_stream)
    expected.unlearn([1])
    assert strategy.model.tasks == (0, 2)
    assert bits(strategy.model) == bits(expected.model)
    assert not hasattr(benchmark.train_stream[0], "task_labels")  # the user's stream is unchanged
    with pytest.raises(TaskError, match="streams of 3 and of 2 experiences have no task labels"):
        strategy.eval(of_sets(tiny.data(), tiny.data(32)).test_stream)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_validation_stream_keeps_the_tasks_of_its_samples(kind):
    """Three tasks of one class each; the requests are added after the split."""
    benchmark = benchmarks.benchmark_with_validation_stream(tiny.tasks([[2], [0], [1]]), 0.25)
    benchmark = with_unlearning(benchmark, {2: [0]})
    strategy = tiny.strategy(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this stream has no task labels")
        strategy.train(benchmark.train_stream)
        strategy.eval(benchmark.valid_stream)
        strategy.eval(benchmark.test_stream)
    assert strategy.model.tasks == (1, 2)


def test_a_part_of_a_task_is_refused_with_settings_that_would_train_it():
    stream = benchmarks.split_online_stream(tiny.tasks().train_stream, experience_size=4)
    strategy = tiny.strategy()
    for ask in (strategy.train, strategy.eval):
        with pytest.raises(TaskError, match=r"a part of a task, as split_online_stream makes it.*train_mb_size=4 and"):
            ask(benchmarks.with_task_labels(stream) if ask == strategy.eval else stream)
    assert strategy.model.tasks == ()


def test_a_single_experience_counts_as_a_stream():
    alone = benchmarks.DatasetExperience(dataset=as_classification_dataset(tiny.data()))
    strategy = tiny.strategy()
    with pytest.warns(UserWarning, match="each of its 1 experiences"):
        strategy.train(alone)
    assert strategy.model.tasks == (0,)
