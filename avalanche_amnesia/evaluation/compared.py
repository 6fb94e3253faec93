"""Base of metrics that give a number of the main model and the same number of the retrained reference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from avalanche.evaluation.metric_results import MetricValue
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation.probes import ProbingMetric, unlearning_of
from avalanche_amnesia.evaluation.references import References


class ComparedMetric(ProbingMetric):
    """A number per unlearned task, of the main model and of the reference, which never saw the task.

    Emitted after every evaluation between tasks, per unlearned task and as their mean, under the metric's name, and
    the reference's as ``<name>_reference``. ``<name>_tasks`` says how many tasks the mean covers: those of which
    nothing was kept (``keep_probes=False``) are left out.

    Args:
        benchmark: of the run; its streams hold the unlearned tasks' data.
        references: of the run; None: no comparison.

    Raises:
        TypeError: for a benchmark or references that are none.
    """

    helper: str
    """Name of the helper that makes the metric, for messages."""

    def __init__(self, benchmark: Any, references: References | None = None) -> None:
        super().__init__()
        if not hasattr(benchmark, "test_stream"):
            raise TypeError(
                f"the first argument is the benchmark: {self.helper}(benchmark, references), got {benchmark!r}"
            )
        if references is not None:
            checks.instance("references", references, References, "References(make_strategy, benchmark), or None")
            references.expect("same")
        self.references = references
        self.test_experiences = by_task_label(benchmark.test_stream)

    def before_training_exp(self, strategy: Any) -> None:
        """Check that what is trained is what the references are trained on."""
        if self.references is not None:
            self.references.check(strategy.experience)

    def values(self, strategy: Any, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """The main model's numbers, then the reference's."""
        main = strategy.model
        by_task = self._by_task(main, main, unlearned, remaining)
        results = [*self.emit(strategy, str(self), by_task), self.emit_coverage(strategy, by_task)]
        if self.references is not None:
            self.references.check_labels(unlearning_of(strategy).history.data)
            by_task = self._by_task(self.references.reference(remaining), main, unlearned, remaining)
            results += self.emit(strategy, f"{self}_reference", by_task)
        return results

    def _by_task(
        self, model: nn.Module, main: nn.Module, unlearned: Sequence[int], remaining: Sequence[int]
    ) -> dict[int, float]:
        numbers = {task: self.number(model, main, task, remaining) for task in unlearned}
        return {task: number for task, number in numbers.items() if number is not None}

    @abstractmethod
    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Number of one unlearned task; None where what it needs was not kept.

        Args:
            model: the main model, or the reference.
            main: the main model.
            task: the unlearned task.
            remaining: tasks that both models have.
        """


def by_task_label(stream: Iterable[Any]) -> dict[int, Any]:
    """Task → its experience in a stream."""
    return {int(experience.task_label): experience for experience in stream}


def some_task_data(experience: Any, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of at most so many of an experience's samples, evenly spread, as its evaluation sees them."""
    n = len(experience.dataset)
    return task_data(experience, None if n <= samples else torch.linspace(0, n - 1, samples).long())
