"""Streams of Avalanche's builders are identified or refused; its strategies and checks run on our streams."""

import functools
import warnings

import pytest
import torch
from avalanche.benchmarks import (
    DatasetExperience,
    benchmark_from_datasets,
    benchmark_with_validation_stream,
    class_incremental_benchmark,
    nc_benchmark,
    new_instances_benchmark,
    ni_benchmark,
    split_online_stream,
    task_incremental_benchmark,
    with_task_labels,
)
from avalanche.benchmarks.utils import (
    AvalancheDataset,
    DataAttribute,
    TaskAwareSupervisedClassificationDataset,
    TaskLabels,
    as_classification_dataset,
)
from avalanche.evaluation.metrics import accuracy_metrics, confusion_matrix_metrics, forgetting_metrics
from avalanche.logging import BaseLogger
from avalanche.training import LwF, Naive, Replay
from avalanche.training.plugins import EvaluationPlugin
from support import tiny
from support.stock_hosts import AvalancheNet
from support.strategies import make, stock
from support.strategy_state import bits, unchanged, unlearning_plugin
from torch import nn
from torch.utils.data import TensorDataset

from avalanche_amnesia import MultiHeadModel, TaskError, with_unlearning
from avalanche_amnesia.benchmarks import SplitDigits, task_benchmark
from avalanche_amnesia.models import UnknownTaskError


def of_sets(*sets):
    """Avalanche's basic builder, without task labels."""
    return benchmark_from_datasets(
        train=[as_classification_dataset(one) for one in sets], test=[as_classification_dataset(one) for one in sets]
    )


def domains():
    return of_sets(tiny.data(16), tiny.data(24), tiny.data(32))


def new_classes():
    sets = {name: as_classification_dataset(tiny.data(classes=4)) for name in ("train", "test")}
    return class_incremental_benchmark(sets, num_experiences=2, class_order=[0, 1, 2, 3])


def mixed():
    data = tiny.data()
    labels = [DataAttribute(data.targets, "targets"), TaskLabels([i % 2 for i in range(len(data))])]
    part = TaskAwareSupervisedClassificationDataset([data], data_attributes=labels)
    return with_task_labels(benchmark_from_datasets(train=[part, part], test=[part, part]))


def zero_labels(make):
    return make(tiny.data(classes=4), tiny.data(classes=4), 2, task_labels=False, seed=0)


def unlabelled():
    """A task whose list of labels is empty."""
    benchmark = tiny.tasks()
    benchmark.train_stream[0].task_labels = []
    return benchmark


MEND = r"task_incremental_benchmark\(benchmark, reset_task_labels=True\)"
REFUSED = {
    "new classes": (new_classes, "2 experiences of this stream have no task labels, as in a class-.*" + MEND),
    "own classes": (lambda: of_sets(tiny.data(), tiny.data(first=2)), "no task labels, as in a class-.*" + MEND),
    "all zero, classes": (functools.partial(zero_labels, nc_benchmark), "2 experiences .* that task label.*" + MEND),
    "all zero, samples": (functools.partial(zero_labels, ni_benchmark), "2 experiences .* that task label.*" + MEND),
    "new samples": (
        lambda: new_instances_benchmark(*(as_classification_dataset(tiny.data()) for _ in "ab"), 2),
        "2 experiences of this stream have no task labels, as in a class- or domain-.*" + MEND,
    ),
    "mixed": (mixed, r"exactly one task, got task labels \[0, 1\].*" + MEND),
    "empty": (unlabelled, r"must have a task label, got task labels \[\].*" + MEND),
    "no labels": (
        lambda: benchmark_from_datasets(train=[AvalancheDataset([TensorDataset(torch.zeros(2, 8))])]),
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
    benchmark = task_incremental_benchmark(REFUSED[name][0](), reset_task_labels=True)
    strategy = tiny.strategy()
    strategy.train(benchmark.train_stream)
    strategy.eval(benchmark.test_stream)
    assert strategy.model.tasks == (0, 1)


@pytest.mark.parametrize("split", [False, True])
def test_positions_are_the_tasks_of_a_stream_without_labels_and_one_warning_names_this(split):
    benchmark = benchmark_with_validation_stream(domains(), 0.25) if split else domains()
    strategy, expected = tiny.strategy(), tiny.strategy()
    with pytest.warns(UserWarning, match="no task labels: each of its 3 experiences is taken as the task of its place"):
        strategy.train(benchmark.train_stream[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        strategy.train(benchmark.train_stream[1:], eval_streams=[benchmark.test_stream[:2]])
        strategy.eval(benchmark.test_stream)
        strategy.unlearn([1])
    expected.train(task_incremental_benchmark(benchmark).train_stream)
    expected.unlearn([1])
    assert strategy.model.tasks == (0, 2)
    assert bits(strategy.model) == bits(expected.model)
    assert not hasattr(benchmark.train_stream[0], "task_labels")  # the user's stream is unchanged
    with pytest.raises(TaskError, match="streams of 3 and of 2 experiences have no task labels"):
        strategy.eval(of_sets(tiny.data(), tiny.data(32)).test_stream)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_validation_stream_keeps_the_tasks_of_its_samples(kind):
    """Three tasks of one class each; the requests are added after the split."""
    benchmark = benchmark_with_validation_stream(tiny.tasks([[2], [0], [1]]), 0.25)
    benchmark = with_unlearning(benchmark, {2: [0]})
    strategy = tiny.strategy(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this stream has no task labels")
        strategy.train(benchmark.train_stream)
        strategy.eval(benchmark.valid_stream)
        strategy.eval(benchmark.test_stream)
    assert strategy.model.tasks == (1, 2)


def test_a_part_of_a_task_is_refused_with_settings_that_would_train_it():
    stream = split_online_stream(tiny.tasks().train_stream, experience_size=4)
    strategy = tiny.strategy()
    for ask in (strategy.train, strategy.eval):
        with pytest.raises(TaskError, match=r"a part of a task, as split_online_stream makes it.*train_mb_size=4 and"):
            ask(with_task_labels(stream) if ask == strategy.eval else stream)
    assert strategy.model.tasks == ()


def test_a_single_experience_counts_as_a_stream():
    alone = DatasetExperience(dataset=as_classification_dataset(tiny.data()))
    strategy = tiny.strategy()
    with pytest.warns(UserWarning, match="each of its 1 experiences"):
        strategy.train(alone)
    assert strategy.model.tasks == (0,)


def run(kind, benchmark, **options):
    evaluator = EvaluationPlugin(
        accuracy_metrics(experience=True, stream=True),
        forgetting_metrics(experience=True),
        confusion_matrix_metrics(stream=True, save_image=True),
        loggers=[BaseLogger()],
        strict_checks=True,
    )
    torch.manual_seed(0)
    options |= {"criterion": nn.CrossEntropyLoss(), "train_mb_size": 32, "train_epochs": 4, "evaluator": evaluator}
    strategy, results = make(kind, model=AvalancheNet(), optimizer="sgd", **options), {}
    for experience in benchmark.train_stream[:2]:
        strategy.train(experience)
        results = strategy.eval(benchmark.test_stream)
    return strategy.model, results


@pytest.mark.parametrize(("kind", "options"), [(LwF, {"alpha": 1.0, "temperature": 2.0}), (Replay, {"mem_size": 50})])
def test_avalanche_s_strategies_train_and_evaluate(kind, options):
    benchmark = SplitDigits()
    if kind is Replay:
        benchmark = with_unlearning(benchmark, {1: [0]}, permanent=[1])
    _, results = run(kind, benchmark, **options)
    accuracies = [v for k, v in results.items() if k.startswith("Top1_Acc_Exp")]
    assert len(accuracies) == 5
    assert min(accuracies[:2]) > 0.75
    assert any("ConfusionMatrix" in name for name in results)


def test_no_padding_wins_the_argmax_if_task_labels_are_tensors():  # trap 1
    benchmark = SplitDigits()
    model, _ = run(Naive, benchmark)
    for task, experience in enumerate(benchmark.test_stream[:2]):
        x, y = experience.tensors
        own_head = model(x, task).argmax(dim=1)
        by_sample = model(x, torch.full((len(x),), task)).argmax(dim=1)
        assert torch.equal(own_head, by_sample)
        assert set(y.tolist()) == {0, 1}


def test_a_multi_head_classifier_adapts_to_tasks_of_unequal_size():  # traps 2 and 3
    x, y = torch.rand(60, 64), torch.arange(60) % 6
    benchmark = task_benchmark((x, y), (x, y), [[0, 1], [2, 3, 4, 5]])
    model = AvalancheNet()
    for experience in benchmark.train_stream:
        model.classifier.adaptation(experience)
    assert [head.classifier.out_features for head in model.classifier.classifiers.values()] == [2, 4]
