"""Accuracy on unlearned tasks, through the head and mask that they had: what an attacker who kept them still reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from avalanche.evaluation.metric_results import MetricValue

from avalanche_amnesia.evaluation.features import features_of, task_data
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.probes import ProbingMetric


class UnlearnedAccuracy(ProbingMetric):
    """Accuracy of the kept head on the model's features through the kept mask, on unlearned tasks' test data.

    In [0, 1]; near chance is good. Emitted after every evaluation between tasks, per unlearned task and as their mean,
    as ``UnlearnedAccuracy``. A rise after later tasks is a relapse.

    Args:
        benchmark: of the run; its test stream holds the unlearned tasks' data.
    """

    higher_is_better = False
    lower_bound, upper_bound = 0.0, 1.0

    def __init__(self, benchmark: Any) -> None:
        super().__init__()
        self.experiences = {int(e.task_label): e for e in benchmark.test_stream}

    def values(self, strategy: Any, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """Accuracy through the probes of the tasks that have one."""
        by_task = {}
        for task in unlearned:
            probe = self.probes.get(task)
            if probe is not None and probe.head is not None:
                x, y = task_data(self.experiences[task])
                features = features_of(strategy.model, x, probe.mask)
                by_task[task] = accuracy(probe.head.cpu()(features), y)
        return self.emit(strategy, str(self), by_task)

    def __str__(self) -> str:
        return "UnlearnedAccuracy"


def unlearned_accuracy_metrics(benchmark: Any) -> list[UnlearnedAccuracy]:
    """Accuracy on the unlearned tasks of a benchmark through what the evaluation kept of them."""
    return [UnlearnedAccuracy(benchmark)]
