"""Accuracy on unlearned tasks with copies of their old heads and masks, as an attacker may have them."""

from collections.abc import Iterator, Sequence
from typing import Any

from avalanche.evaluation.metric_results import MetricValue
from torch import nn

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation.bases import ComparedMetric
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.strategy import Strategy


class UnlearnedAccuracy(ComparedMetric):
    """Metric: accuracy on unlearned tasks' test data, with the mask and head kept from before the unlearning.

    In [0, 1]; good values are near chance or near the same head's accuracy on the retrained reference. Emitted after
    every evaluation between tasks, per unlearned task and as their mean, as ``UnlearnedAccuracy``; the reference's as
    ``UnlearnedAccuracy_reference``; ``UnlearnedAccuracy_chance`` is the accuracy of guessing among the task's classes.
    ``UnlearnedAccuracy_floor_order`` is that of the reference with another data order, if another metric expects one.
    ``UnlearnedAccuracy_tasks`` is the number of tasks in these means, ``UnlearnedAccuracy_samples`` of test samples;
    tasks without a probe (``keep_probes=False``) are left out. A rise after later tasks is a relapse.

    Arguments, and errors, are those of :class:`ComparedMetric`.
    """

    helper = "unlearned_accuracy_metrics"

    def models(self, main: nn.Module, remaining: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
        """Yield (suffix, model): the main, the retrained and, if another metric needs it, one with other data order."""
        yield from super().models(main, remaining)
        if self._active_references is not None and ("order", tuple(remaining)) in self._active_references.expected():
            yield "_floor_order", self._active_references.reference(remaining, "order")

    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Return ``model``'s accuracy on ``task`` with the mask and head saved before its unlearning, or None."""
        x, y = task_data(self.test_experiences[task])
        logits = self.probed_logits(model, x, task)
        return None if logits is None else accuracy(logits, y)

    def derived_values(self, strategy: Strategy, numbers: dict[str, dict[int, float]]) -> list[MetricValue]:
        """Return each task's chance accuracy and number of test samples as metric values, with their mean and sum."""
        chances = {task: 1 / len(self.test_experiences[task].classes_in_this_experience) for task in numbers[""]}
        samples = {task: len(self.test_experiences[task].dataset) for task in numbers[""]}
        return [
            *self.emit_by_task(strategy, f"{self}_chance", chances),
            *self.emit_by_task(strategy, f"{self}_samples", samples, sum(samples.values())),
        ]


def unlearned_accuracy_metrics(benchmark: Any, references: References | None = None) -> list[UnlearnedAccuracy]:
    """Return a list with the metric :class:`UnlearnedAccuracy`; arguments as for the class."""
    return [UnlearnedAccuracy(benchmark, references)]
