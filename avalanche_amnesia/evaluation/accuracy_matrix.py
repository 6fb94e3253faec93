"""Accuracy matrix of a run with unlearning, and its average accuracy, forgetting, backward and forward transfer."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from avalanche.evaluation.metric_results import MetricValue
from matplotlib.figure import Figure

from avalanche_amnesia.evaluation.bases import CallbackMetric
from avalanche_amnesia.evaluation.figures import Table, matrix_figure
from avalanche_amnesia.evaluation.picture import Picture
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.training.host.rollback import is_finishing

Row = Mapping[int, float]
"""Task → its accuracy in [0, 1] at one evaluation; tasks that were unlearned are left out."""


def average_accuracy(matrix: Sequence[Row]) -> float | None:
    """Return the mean accuracy in the last row (tasks not unlearned), in [0, 1]; None if no task was evaluated."""
    return fmean(matrix[-1].values()) if matrix and matrix[-1] else None


def forgetting(matrix: Sequence[Row]) -> float | None:
    """Return the mean forgetting: best earlier accuracy minus last accuracy, over tasks not unlearned, in [−1, 1].

    ``F = mean_i max_{l < T} (a_{l,i} − a_{T,i})`` over tasks with an earlier row (Chaudhry et al., Riemannian walk for
    incremental learning, ECCV 2018). The history of a relearned task begins with its last training. Rows are in the
    order of the evaluations. Positive where tasks lost accuracy; None where no task has an earlier row.
    """
    lost = [max(history[:-1]) - history[-1] for history in _histories(matrix) if len(history) > 1]
    return fmean(lost) if lost else None


def backward_transfer(matrix: Sequence[Row]) -> float | None:
    """Return the mean backward transfer: last accuracy minus first accuracy, over tasks not unlearned, in [−1, 1].

    ``BWT = mean_i (a_{T,i} − a_{i,i})`` over tasks with an earlier row (Lopez-Paz and Ranzato, Gradient episodic
    memory, NeurIPS 2017); a task's first row is the one after its training. Positive where later tasks helped; None
    where no task has an earlier row.
    """
    gained = [history[-1] - history[0] for history in _histories(matrix) if len(history) > 1]
    return fmean(gained) if gained else None


def forward_transfer(matrix: Sequence[Row], alone: Row) -> float | None:
    """Return the mean forward transfer: a task's first accuracy minus that of a model trained on it alone, in [−1, 1].

    Args:
        matrix: rows in the order of the evaluations; a task's first row is the one after its training.
        alone: task → accuracy of a model that learned nothing else (``References.reference([task])``).

    Returns:
        Positive where earlier tasks helped; None where no remaining task is in ``alone``.
    """
    last = matrix[-1] if matrix else {}
    gained = [history[0] - alone[task] for task, history in zip(last, _histories(matrix), strict=True) if task in alone]
    return fmean(gained) if gained else None


def _histories(matrix: Sequence[Row]) -> list[list[float]]:
    """Return, for each task in the last row, a list of its accuracies since its last training."""
    result = []
    for task in matrix[-1] if matrix else ():
        history: list[float] = []
        for row in reversed(matrix):
            if task not in row:
                break
            history.insert(0, row[task])
        result.append(history)
    return result


class AccuracyMatrix(CallbackMetric):
    """Metric: matrix of every task's accuracy after each training and unlearning, with forgetting and transfer.

    Emits ``AverageAccuracy``, ``Forgetting`` and ``BackwardTransfer`` after each evaluation of a test stream; the last
    two from the second evaluation on; and ``Figure/AccuracyMatrix``, a picture with its table: a row per evaluation, a
    column per task. Of several evaluations between two trainings or unlearnings the last one counts; those in the
    middle of a task, interrupted ones included until they are given up, and those of training data don't.

    Earlier rows contain the accuracy that a task had before it was unlearned. Later rows contain none of that task.

    Attributes:
        rows: one per evaluation, see :data:`Row`.
        names: of the rows: the task just trained, or the tasks just unlearned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[int, float]] = []
        self.names: list[str] = []
        self._stands_at: list[tuple[int, int]] = []
        self._trains = False
        self._right: defaultdict[int, int] = defaultdict(int)
        self._seen: defaultdict[int, int] = defaultdict(int)

    def state(self) -> dict[str, Any]:
        """Return the state to save: rows, row names, and the numbers of trainings and unlearnings before each row."""
        return {"rows": self.rows, "names": self.names, "stands_at": self._stands_at}

    def load_state(self, state: Any) -> None:
        """Load a state that :meth:`state` returned."""
        self.rows, self.names, self._stands_at = checked(state, rows=list, names=list, stands_at=list)

    def before_training(self, strategy: Strategy) -> None:
        """Before a call of ``strategy.train``: ignore evaluations until that call ends."""
        self._trains = True

    def after_training(self, strategy: Strategy) -> None:
        """After a call of ``strategy.train``: let evaluations add rows again."""
        self._trains = False

    def before_eval(self, strategy: Strategy) -> None:
        """Before an evaluation: delete the counts of the last evaluation."""
        self._right.clear()
        self._seen.clear()

    def after_eval_iteration(self, strategy: Strategy) -> None:
        """After an evaluation mini-batch: count correct predictions per task, unless it is training data."""
        stream = getattr(strategy.experience, "origin_stream", None)
        if getattr(stream, "name", None) == "train":
            return
        right = strategy.mb_output.argmax(1) == strategy.mb_y
        for task in strategy.mb_task_id.unique().tolist():
            of_task = strategy.mb_task_id == task
            self._right[task] += int((right & of_task).sum())
            self._seen[task] += int(of_task.sum())

    def after_eval(self, strategy: Strategy) -> list[MetricValue] | None:
        """After an evaluation: add a matrix row, return the metrics; None during a training or without test samples."""
        holder, trains = unlearning_of(strategy) or strategy.model, self._trains
        if hasattr(holder, "current_task"):
            trains = holder.current_task is not None or is_finishing(strategy)
        if not self._seen or trains:
            return None
        at = _event_counts(strategy)
        if self._stands_at and self._stands_at[-1] == at:
            for of_rows in (self.rows, self.names, self._stands_at):
                of_rows.pop()
        self.rows.append({task: self._right[task] / seen for task, seen in sorted(self._seen.items())})
        self.names.append(_row_name(strategy, before=self._stands_at[-1] if self._stands_at else (0, 0)))
        self._stands_at.append(at)
        values = {
            "AverageAccuracy/eval_phase/test_stream": average_accuracy(self.rows),
            "Forgetting/eval_phase/test_stream": forgetting(self.rows),
            "BackwardTransfer/eval_phase/test_stream": backward_transfer(self.rows),
            "Figure/AccuracyMatrix": Picture(_matrix_figure, self.table(), table=self.table()),
        }
        return self.emit(strategy, values)

    def table(self) -> Table:
        """Return the matrix as a table: a column per task, a row per evaluation, named by the last event before it."""
        tasks = sorted({task for row in self.rows for task in row})
        rows = [(name, *(row.get(t) for t in tasks)) for name, row in zip(self.names, self.rows, strict=True)]
        return Table(("after", *(f"task {task}" for task in tasks)), tuple(rows))

    def reset(self, strategy: Strategy | None = None) -> None:
        """Delete all rows of the matrix."""
        self.rows, self.names, self._stands_at = [], [], []


def _event_counts(strategy: Strategy) -> tuple[int, int]:
    """Return (number of finished trainings, number of finished unlearnings)."""
    plugin = unlearning_of(strategy)
    if plugin is not None:
        return plugin.ledger.n_trained, len(plugin.records)
    masks = getattr(strategy.model, "masks", None)
    return (strategy.clock.train_exp_counter if masks is None else len(masks)), 0


def _row_name(strategy: Strategy, before: tuple[int, int]) -> str:
    """Name a row by the events since the counts ``before`` (trainings, unlearnings), e.g. ``task 3, unlearned 0``."""
    trainings, unlearnings = _event_counts(strategy)
    plugin = unlearning_of(strategy)
    if plugin is None:
        return f"training {trainings}"
    last = plugin.trained[-1:] if trainings > before[0] else ()
    removed = [task for record in plugin.records[before[1] : unlearnings] for task in record.tasks]
    parts = [f"task {task}" for task in last] + ([f"unlearned {', '.join(map(str, removed))}"] if removed else [])
    return ", ".join(parts)


def _matrix_figure(table: Table) -> Figure:
    return matrix_figure(
        "test accuracy (%)",
        [row[1:] for row in table.rows],
        rows=[row[0] for row in table.rows],
        columns=[name.removeprefix("task ") for name in table.columns[1:]],
        row_label="after",
        column_label="tested on task",
        note="empty: not trained yet, or unlearned",
    )


def accuracy_matrix_metrics() -> list[AccuracyMatrix]:
    """Return a list with the metric of average accuracy, forgetting and backward transfer over tasks not unlearned."""
    return [AccuracyMatrix()]
