"""Accuracy on unlearned tasks through the heads and masks that they had, as an attacker who kept them would see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from avalanche.evaluation.metric_results import MetricValue
from torch import nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation.features import features_of
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.probes import ProbingMetric, unlearning_of
from avalanche_amnesia.evaluation.references import References


class UnlearnedAccuracy(ProbingMetric):
    """Accuracy of the kept head on the model's features through the kept mask, on unlearned tasks' test data.

    In [0, 1]; near chance, or near what the same head reads from the retrained reference, is good. Emitted after every
    evaluation between tasks, per unlearned task and as their mean, as ``UnlearnedAccuracy``, and the reference's as
    ``UnlearnedAccuracy_reference``. ``UnlearnedAccuracy_tasks`` says how many tasks these means cover: those of which
    nothing was kept (``keep_probes=False``) are left out. A rise after later tasks is a relapse.

    Args:
        benchmark: of the run; its test stream holds the unlearned tasks' data.
        references: of the run; None: no comparison.

    Raises:
        TypeError: for a benchmark or references that are none.
    """

    higher_is_better = False
    lower_bound, upper_bound = 0.0, 1.0

    def __init__(self, benchmark: Any, references: References | None = None) -> None:
        super().__init__()
        if not hasattr(benchmark, "test_stream"):
            raise TypeError(
                "the first argument is the benchmark: unlearned_accuracy_metrics(benchmark, references), got "
                f"{benchmark!r}"
            )
        if references is not None:
            checks.instance("references", references, References, "References(make_strategy, benchmark), or None")
        self.references = references
        if references is not None:
            references.expect("same")
        self.experiences = {int(e.task_label): e for e in benchmark.test_stream}

    def before_training_exp(self, strategy: Any) -> None:
        """Check that what is trained is what the references are trained on."""
        if self.references is not None:
            self.references.check(strategy.experience)

    def values(self, strategy: Any, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """Accuracy through the probes of the tasks that have one."""
        by_task = self._by_task(strategy.model, unlearned)
        results = [*self.emit(strategy, str(self), by_task), self.emit_coverage(strategy, by_task)]
        if self.references is not None:
            self.references.check_labels(unlearning_of(strategy).history.data)
            reference = self.references.reference(remaining)
            results += self.emit(strategy, f"{self}_reference", self._by_task(reference, unlearned))
        return results

    def _by_task(self, model: nn.Module, unlearned: Sequence[int]) -> dict[int, float]:
        by_task = {}
        for task in unlearned:
            probe = self.probes.get(task)
            if probe is not None and probe.head is not None:
                x, y = task_data(self.experiences[task])
                features = features_of(model, x, probe.mask, parts=probe.parts, task=task)
                by_task[task] = accuracy(probe.head.cpu()(features), y)
        return by_task

    def __str__(self) -> str:
        return "UnlearnedAccuracy"


def unlearned_accuracy_metrics(benchmark: Any, references: References | None = None) -> list[UnlearnedAccuracy]:
    """Accuracy on the unlearned tasks of a benchmark through what the evaluation kept of them.

    Args:
        benchmark: of the run.
        references: beside it, what the same heads read from the retrained reference; None: not measured.
    """
    return [UnlearnedAccuracy(benchmark, references)]
