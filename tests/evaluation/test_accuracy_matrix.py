"""Measures of an accuracy matrix against loops over it, and the metric against the host's own accuracies."""

import numpy as np
import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from support.fault_injection import FailsAtEvent, InjectedError
from support.strategies import DIGITS, amnesiac, learn, quiet

from avalanche_amnesia import accuracy_matrix_metrics, with_unlearning
from avalanche_amnesia.evaluation import average_accuracy, forgetting, forward_transfer
from avalanche_amnesia.evaluation.accuracy_matrix import backward_transfer


@pytest.mark.parametrize("seed", range(5))
def test_without_requests_they_are_the_textbook_s(seed):
    a = np.random.default_rng(seed).random((5, 5))
    matrix = [{i: float(a[t, i]) for i in range(t + 1)} for t in range(5)]
    alone = {i: float(a[0, i]) for i in range(5)}
    assert average_accuracy(matrix) == pytest.approx(a[4].mean())
    assert forgetting(matrix) == pytest.approx(np.mean([a[i:4, i].max() - a[4, i] for i in range(4)]))
    assert backward_transfer(matrix) == pytest.approx(np.mean([a[4, i] - a[i, i] for i in range(4)]))
    assert forward_transfer(matrix, alone) == pytest.approx(np.mean([a[i, i] - a[0, i] for i in range(5)]))


def test_unlearned_tasks_do_not_count_and_one_learned_again_begins_anew():
    matrix = [{0: 0.9}, {0: 0.8, 1: 0.7}, {1: 0.6}, {0: 0.5, 1: 0.6}, {0: 0.4, 1: 0.65}]
    assert average_accuracy(matrix) == pytest.approx(0.525)
    assert forgetting(matrix) == pytest.approx((0.1 + 0.05) / 2)
    assert backward_transfer(matrix) == pytest.approx((-0.1 - 0.05) / 2)
    assert forward_transfer(matrix, {0: 0.4}) == pytest.approx(0.1)


def test_of_nothing_there_is_nothing():
    for matrix in ([], [{}], [{0: 0.5}, {}]):
        assert average_accuracy(matrix) is forgetting(matrix) is backward_transfer(matrix) is None
        assert forward_transfer(matrix, {0: 1.0}) is None
    assert forgetting([{0: 0.5}]) is None
    assert forward_transfer([{0: 0.5}], {}) is None


def test_the_metric_agrees_with_the_host_s():
    benchmark = with_unlearning(DIGITS, {2: [0]})
    (metric,) = metrics = accuracy_matrix_metrics()
    evaluator = EvaluationPlugin(
        metrics, accuracy_metrics(experience=True), forgetting_metrics(stream=True), loggers=[BaseLogger()]
    )
    strategy = amnesiac(train_epochs=1, evaluator=evaluator, reset_optimizer=True)
    seen = []
    for experience in benchmark.train_stream[:4]:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
        results = strategy.eval(benchmark.test_stream)  # looked at twice: one row
        name = "Top1_Acc_Exp/eval_phase/test_stream/Task{0:03d}/Exp{0:03d}"
        assert metric.rows[-1] == {task: results[name.format(task)] for task in metric.rows[-1]}
        seen.append(metric.rows[-1])
        mean = sum(metric.rows[-1].values()) / len(metric.rows[-1])
        assert results["AverageAccuracy/eval_phase/test_stream"] == pytest.approx(mean)
    assert [list(row) for row in metric.rows] == [[0], [0, 1], [1, 2], [1, 2, 3]]
    lost = [max(seen[1][1], seen[2][1]) - seen[3][1], seen[2][2] - seen[3][2]]  # the request for task 0 changed both
    assert results["Forgetting/eval_phase/test_stream"] == pytest.approx(np.mean(lost))
    gained = [seen[3][1] - seen[1][1], seen[3][2] - seen[2][2]]
    assert results["BackwardTransfer/eval_phase/test_stream"] == pytest.approx(np.mean(gained))


def test_a_training_that_was_interrupted_is_over_when_it_is_given_up():
    (metric,) = metrics = accuracy_matrix_metrics()
    interrupter = FailsAtEvent()
    strategy = learn(amnesiac(train_epochs=1, evaluator=quiet(metrics), plugins=[interrupter]), DIGITS.train_stream[:2])
    strategy.eval(DIGITS.test_stream)
    interrupter.event = "after_training_epoch"
    with pytest.raises(InjectedError):
        strategy.train(DIGITS.train_stream[2])
    interrupter.event = ""
    strategy.eval(DIGITS.test_stream)
    assert len(metric.rows) == 1  # the model is in the middle of a task
    strategy.abort_training()
    strategy.unlearn([0])
    strategy.eval(DIGITS.test_stream)
    assert [list(row) for row in metric.rows] == [[0, 1], [1]]
    assert metric.names == ["task 1", "unlearned 0"]
    strategy.train(DIGITS.train_stream[3])
    strategy.eval(DIGITS.test_stream)
    assert list(metric.rows[-1]) == [1, 3]


@pytest.mark.parametrize("eval_every", [0, 1])
def test_evaluations_of_a_training_make_no_row_twice(eval_every):
    (metric,) = metrics = accuracy_matrix_metrics()
    strategy = amnesiac(evaluator=quiet(metrics), eval_every=eval_every)
    for experience in DIGITS.train_stream[:2]:
        strategy.train(experience)  # evaluates the training data
        assert len(metric.rows) == experience.task_label
        strategy.eval(DIGITS.test_stream)
    assert [list(row) for row in metric.rows] == [[0], [0, 1]]


def test_the_table_has_a_row_per_evaluation_and_leaves_out_what_is_gone():
    benchmark = with_unlearning(DIGITS, {1: [0]})
    (metric,) = metrics = accuracy_matrix_metrics()
    strategy = amnesiac(train_epochs=1, evaluator=quiet(metrics))
    for experience in benchmark.train_stream[:2]:
        strategy.train(experience)
        results = strategy.eval(benchmark.test_stream)
    table = metric.table()
    assert table.columns == ("after", "task 0", "task 1")
    assert table.rows == (("task 0", metric.rows[0][0], None), ("task 1, unlearned 0", None, metric.rows[1][1]))
    picture = results["Figure/AccuracyMatrix"]
    assert picture.table == table
    assert (picture.image.dtype, picture.image.shape[0]) == (torch.uint8, 3)
