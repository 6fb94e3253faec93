"""Accuracy matrix of a stream with requests: average accuracy, forgetting, backward and forward transfer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue

Row = Mapping[int, float]
"""Task → its accuracy in [0, 1] at one evaluation; tasks that were unlearned are left out."""


def average_accuracy(matrix: Sequence[Row]) -> float | None:
    """Mean of the last row: accuracy on the remaining tasks, in [0, 1]; None where none was evaluated."""
    return fmean(matrix[-1].values()) if matrix and matrix[-1] else None


def forgetting(matrix: Sequence[Row]) -> float | None:
    """Mean over the remaining tasks of their best earlier accuracy minus the last one, in [−1, 1].

    ``F = mean_i max_{l < T} (a_{l,i} − a_{T,i})`` over tasks with an earlier row (Chaudhry et al., Riemannian walk for
    incremental learning, ECCV 2018). A task that is learned again after it was unlearned counts from then on.

    Args:
        matrix: rows in the order of the evaluations.

    Returns:
        Positive where tasks lost accuracy; None where no task has an earlier row.
    """
    lost = [max(history[:-1]) - history[-1] for history in _histories(matrix) if len(history) > 1]
    return fmean(lost) if lost else None


def backward_transfer(matrix: Sequence[Row]) -> float | None:
    """Mean over the remaining tasks of their last accuracy minus the first one, in [−1, 1].

    ``BWT = mean_i (a_{T,i} − a_{i,i})`` over tasks with an earlier row (Lopez-Paz and Ranzato, Gradient episodic
    memory, NeurIPS 2017).

    Args:
        matrix: rows in the order of the evaluations; a task's first row is the one behind its training.

    Returns:
        Positive where later tasks helped; None where no task has an earlier row.
    """
    gained = [history[-1] - history[0] for history in _histories(matrix) if len(history) > 1]
    return fmean(gained) if gained else None


def forward_transfer(matrix: Sequence[Row], alone: Row) -> float | None:
    """Mean over tasks of their first accuracy minus that of a model which learned each of them alone, in [−1, 1].

    Args:
        matrix: rows in the order of the evaluations; a task's first row is the one behind its training.
        alone: task → accuracy of a model that learned nothing else (``References.reference([task])``).

    Returns:
        Positive where earlier tasks helped; None where no remaining task is in ``alone``.
    """
    last = matrix[-1] if matrix else {}
    gained = [history[0] - alone[task] for task, history in zip(last, _histories(matrix), strict=True) if task in alone]
    return fmean(gained) if gained else None


def _histories(matrix: Sequence[Row]) -> list[list[float]]:
    """Accuracies of each task of the last row, from its (last) training on."""
    result = []
    for task in matrix[-1] if matrix else ():
        history: list[float] = []
        for row in reversed(matrix):
            if task not in row:
                break
            history.insert(0, row[task])
        result.append(history)
    return result


class AccuracyMatrix(PluginMetric):
    """Accuracy of every remaining task after every training and unlearning, and what follows from it.

    Emits ``AverageAccuracy``, ``Forgetting`` and ``BackwardTransfer`` after each evaluation of a test stream; the last
    two from the second evaluation on. Of several evaluations between two trainings or unlearnings the last one counts.

    Attributes:
        rows: one per evaluation, see :data:`Row`.
    """

    axis = "event"
    """Axis along which a logger draws it: it changes with tasks and unlearnings."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[int, float]] = []
        self._stands_at: list[tuple[int, ...]] = []
        self._trains = False
        self._right: defaultdict[int, int] = defaultdict(int)
        self._seen: defaultdict[int, int] = defaultdict(int)

    def before_training(self, strategy: Any) -> None:
        """Look at no evaluation in the middle of a training."""
        self._trains = True

    def after_training(self, strategy: Any) -> None:
        """Look at evaluations again."""
        self._trains = False

    def before_eval(self, strategy: Any) -> None:
        """Begin a row."""
        self._right.clear()
        self._seen.clear()

    def after_eval_iteration(self, strategy: Any) -> None:
        """Count right answers of a mini-batch, by task."""
        right = strategy.mb_output.argmax(1) == strategy.mb_y
        for task in strategy.mb_task_id.unique().tolist():
            of_task = strategy.mb_task_id == task
            self._right[task] += int((right & of_task).sum())
            self._seen[task] += int(of_task.sum())

    def after_eval(self, strategy: Any) -> list[MetricValue] | None:
        """End the row; None where nothing was evaluated, or in the middle of a training."""
        if not self._seen or self._trains:
            return None
        at = (strategy.clock.train_exp_counter, len(getattr(strategy.model, "tasks", ())))
        if self._stands_at and self._stands_at[-1] == at:
            self.rows.pop()
            self._stands_at.pop()
        self.rows.append({task: self._right[task] / seen for task, seen in sorted(self._seen.items())})
        self._stands_at.append(at)
        values = {
            "AverageAccuracy": average_accuracy(self.rows),
            "Forgetting": forgetting(self.rows),
            "BackwardTransfer": backward_transfer(self.rows),
        }
        x = strategy.clock.train_iterations
        named = {f"{name}/eval_phase/test_stream": value for name, value in values.items()}
        return [MetricValue(self, name, value, x) for name, value in named.items() if value is not None]

    def result(self, strategy: Any = None) -> list[dict[int, float]]:
        """The rows."""
        return self.rows

    def reset(self, strategy: Any = None) -> None:
        """Forget all rows."""
        self.rows, self._stands_at = [], []

    def __str__(self) -> str:
        return "AccuracyMatrix"


def accuracy_matrix_metrics() -> list[AccuracyMatrix]:
    """Metric helper: average accuracy, forgetting and backward transfer of the remaining tasks."""
    return [AccuracyMatrix()]
