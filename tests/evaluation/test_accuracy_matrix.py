"""Accuracy matrix: its measures against loops, and the metric against Avalanche's accuracies."""

import numpy as np
import pytest
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from matplotlib.colors import to_rgb
from support.fault_injection import FailsAtEvent, InjectedError
from support.strategies import DIGITS, amnesiac, learn, quiet

from avalanche_amnesia import accuracy_matrix_metrics, with_unlearning
from avalanche_amnesia.contrib.metrics.mask_use import capacity_figure, overlap_figure
from avalanche_amnesia.evaluation.accuracy_matrix import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
)
from avalanche_amnesia.evaluation.figures import matrix_figure


def test_without_requests_the_measures_are_those_of_the_literature():
    a = np.random.default_rng(0).random((5, 5))
    matrix = [{i: float(a[t, i]) for i in range(t + 1)} for t in range(5)]
    alone = {i: float(a[0, i]) for i in range(5)}
    assert average_accuracy(matrix) == pytest.approx(a[4].mean())
    assert forgetting(matrix) == pytest.approx(np.mean([a[i:4, i].max() - a[4, i] for i in range(4)]))
    assert backward_transfer(matrix) == pytest.approx(np.mean([a[4, i] - a[i, i] for i in range(4)]))
    assert forward_transfer(matrix, alone) == pytest.approx(np.mean([a[i, i] - a[0, i] for i in range(5)]))


def test_unlearned_tasks_do_not_count_and_a_relearned_task_counts_as_new():
    matrix = [{0: 0.9}, {0: 0.8, 1: 0.7}, {1: 0.6}, {0: 0.5, 1: 0.6}, {0: 0.4, 1: 0.65}]
    assert average_accuracy(matrix) == pytest.approx(0.525)
    assert forgetting(matrix) == pytest.approx((0.1 + 0.05) / 2)
    assert backward_transfer(matrix) == pytest.approx((-0.1 - 0.05) / 2)
    assert forward_transfer(matrix, {0: 0.4}) == pytest.approx(0.1)


def test_measures_of_an_empty_matrix_are_none():
    for matrix in ([], [{}], [{0: 0.5}, {}]):
        assert average_accuracy(matrix) is forgetting(matrix) is backward_transfer(matrix) is None
        assert forward_transfer(matrix, {0: 1.0}) is None
    assert forgetting([{0: 0.5}]) is None
    assert forward_transfer([{0: 0.5}], {}) is None


def test_the_metric_agrees_with_avalanches_accuracies():
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
        results = strategy.eval(benchmark.test_stream)  # two evaluations: one row
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


def test_an_interrupted_training_makes_a_row_only_after_it_is_aborted():
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


NAMES = {"row_label": "after", "column_label": "tested on"}


def luminance(colour: str | tuple[float, ...]) -> float:
    """Relative luminance, WCAG 2."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_enough_contrast_on_every_shade() -> None:
    figure = matrix_figure("", [[n / 100] for n in range(101)], rows=range(101), columns=[0], **NAMES)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    (cells,) = ax.collections
    assert [text.get_text() for text in ax.texts] == [str(n) for n in range(101)]
    for text, fill in zip(ax.texts, cells.get_facecolors(), strict=True):
        dark, light = sorted((luminance(text.get_color()), luminance(tuple(fill[:3]))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_matrix_shows_its_numbers() -> None:
    figure = matrix_figure("here", [[1.0, None], [0.493, 0.9]], rows=["task 3", "task 0"], columns=[3, 0], **NAMES)
    (ax,) = figure.axes
    assert ax.get_title() == "here"
    assert {text.get_text(): text.xy for text in ax.texts} == {"100": (0.5, 0.5), "49": (0.5, 1.5), "90": (1.5, 1.5)}
    assert [label.get_text() for label in ax.get_xticklabels()] == ["3", "0"]
    assert ax.get_ylim() == (2, 0)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["task 3", "task 0"]


def test_a_large_matrix_has_a_colour_scale_instead_of_numbers() -> None:
    figure = overlap_figure(range(300), [[n / 300] * 300 for n in range(300)])
    ax, _ = figure.axes
    assert not ax.texts
    assert max(figure.get_size_inches()) < 12


def test_the_figure_of_capacity_names_events_and_marks_requests() -> None:
    figure = capacity_figure(["task 0", "task 2", "unlearned 0"], [0.9, 0.5, 0.75], [0, 0, 1])
    (ax,) = figure.axes
    capacity, request = ax.lines
    assert capacity.get_ydata().tolist() == [0.9, 0.5, 0.75]
    assert request.get_xdata() == [2, 2]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["task 0", "task 2", "unlearned 0"]


def test_a_matrix_without_tasks_is_drawn() -> None:
    assert overlap_figure([], []).texts[0].get_text() == "nothing to show"
