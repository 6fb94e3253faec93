"""Avalanche's strategies, strict checks and confusion matrix run on our streams."""

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics, confusion_matrix_metrics, forgetting_metrics
from avalanche.logging import BaseLogger
from avalanche.training import LwF, Naive, Replay
from avalanche.training.plugins import EvaluationPlugin
from support.stock_hosts import AvalancheNet
from support.strategies import make
from torch import nn

from avalanche_amnesia.benchmarks import SplitDigits, task_benchmark, with_unlearning


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
