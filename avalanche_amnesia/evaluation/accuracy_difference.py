"""Accuracy difference: what unlearning did to the remaining tasks, against a model that never unlearned."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metric_utils import get_metric_name
from avalanche.models import avalanche_forward

from avalanche_amnesia import checks
from avalanche_amnesia.evaluation.probes import unlearning_of
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.models.modes import evaluating


class AccuracyDifference(PluginMetric):
    """``AD_t = 1/|R(t)| Σ_{τ∈R(t)} (a_τ − a_τ^full)``, in [−1, 1], higher is better.

    ``R(t)`` are the remaining tasks, ``a_τ`` is the accuracy on task τ, ``a_τ^full`` that of the full model, which
    learned every task and unlearned none.
    Positive: the freed capacity helped. Emitted after every evaluation between tasks, per remaining task among those
    evaluated and as their mean, as ``AccuracyDifference``.

    Args:
        references: of the run.

    Raises:
        TypeError: for references that are none.
    """

    higher_is_better = True
    lower_bound, upper_bound = -1.0, 1.0
    axis = "event"
    """Axis along which a logger draws it: it changes with tasks and unlearnings."""

    def __init__(self, references: References) -> None:
        super().__init__()
        checks.instance("references", references, References, "References(make_strategy, benchmark)")
        self.references = references
        references.expect("full")
        self._correct: dict[int, list[int]] = {}

    def before_training_exp(self, strategy: Any) -> None:
        """Check that what is trained is what the references are trained on."""
        self.references.check(strategy.experience)

    def before_eval(self, strategy: Any) -> None:
        """Begin to count."""
        self.references.check_labels(unlearning_of(strategy).history.data)
        self._correct = {}

    def after_eval_iteration(self, strategy: Any) -> None:
        """Count what the main and the full model get right of this mini-batch."""
        plugin = unlearning_of(strategy)
        task = int(strategy.experience.task_label)
        if plugin.current_task is not None or task not in plugin.ledger.remaining:
            return
        full = self.references.reference(plugin.trained).to(strategy.device)
        with evaluating(full):
            logits = avalanche_forward(full, strategy.mb_x, strategy.mb_task_id)
        counts = self._correct.setdefault(task, [0, 0, 0])
        for i, output in enumerate((strategy.mb_output, logits)):
            counts[i] += int((torch.argmax(output, 1) == strategy.mb_y).sum())
        counts[2] += len(strategy.mb_y)

    def after_eval(self, strategy: Any) -> list[MetricValue] | None:
        """The difference per task, and the mean."""
        by_task = {task: (main - full) / n for task, (main, full, n) in self._correct.items()}
        if not by_task:
            return None
        x = strategy.clock.train_iterations
        values = [
            MetricValue(self, get_metric_name(self, strategy, add_task=task), value, x)
            for task, value in by_task.items()
        ]
        mean = sum(by_task.values()) / len(by_task)
        return [*values, MetricValue(self, get_metric_name(self, strategy, add_task=False), mean, x)]

    def result(self, strategy: Any = None) -> None:
        """Values are emitted by the callbacks alone."""

    def reset(self, strategy: Any = None) -> None:
        """Forget the counts."""
        self._correct = {}

    def __str__(self) -> str:
        return "AccuracyDifference"


def accuracy_difference_metrics(references: References) -> list[AccuracyDifference]:
    """The accuracy difference of a run to its full models."""
    return [AccuracyDifference(references)]
