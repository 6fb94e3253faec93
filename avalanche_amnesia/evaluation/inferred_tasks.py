"""Metrics of accuracy without task labels: the model infers the task of every sample."""

from typing import Any, Literal

from avalanche.evaluation import GenericPluginMetric
from avalanche.evaluation.metrics import Mean

from avalanche_amnesia import checks
from avalanche_amnesia.models.task_inference import InferenceRule, TaskInference
from avalanche_amnesia.strategy import Strategy


class TaskInferenceMetric(GenericPluginMetric[float, Mean]):
    """Metric: share of samples predicted correctly without a task label, in [0, 1].

    ``TaskInference_Acc``: task and class are right; only the class, if all tasks share one head. Compare it with
    Avalanche's ``accuracy_metrics``, which use the task label. ``TaskInference_Task``: the task is right.
    """

    axis = "event"

    def __init__(self, rule: InferenceRule, emit_at: Literal["experience", "stream"], *, task_only: bool) -> None:
        checks.one_of("rule", rule, InferenceRule)
        super().__init__(Mean(), reset_at=emit_at, emit_at=emit_at, mode="eval")
        self.rule, self.emit_at, self.task_only = rule, emit_at, task_only

    def reset(self) -> None:
        """Reset the mean before an experience or a stream."""
        self._metric.reset()

    def result(self) -> float:
        """Return the share of samples so far whose task (and class, unless ``task_only``) was inferred correctly."""
        return self._metric.result()

    def update(self, strategy: Strategy) -> None:
        """Predict a mini-batch without task labels, and add its share of correct predictions to the mean."""
        model: Any = strategy.model
        predicted = TaskInference(model, self.rule)(strategy.mb_x)
        right = predicted.tasks == strategy.mb_task_id
        if not self.task_only:
            in_common = len({id(model.head(task)) for task in model.tasks}) == 1 < len(model.tasks)
            right = (predicted.classes == strategy.mb_y) & (right | in_common)
        self._metric.update(float(right.float().mean()), len(right))

    def __str__(self) -> str:
        where = "Exp" if self.emit_at == "experience" else "Stream"
        return f"TaskInference_{'Task' if self.task_only else 'Acc'}_{where}"


def task_inference_metrics(rule: InferenceRule = "entropy") -> list[TaskInferenceMetric]:
    """Return metrics of accuracy without task labels and of correctly inferred tasks, per experience and per stream.

    Args:
        rule: decision rule of :class:`TaskInference` for the task of a sample.
    """
    places: tuple[Literal["experience", "stream"], ...] = ("experience", "stream")
    return [TaskInferenceMetric(rule, place, task_only=only) for only in (False, True) for place in places]
