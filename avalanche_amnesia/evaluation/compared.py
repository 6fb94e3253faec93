"""Base of metrics of unlearned tasks that stand beside a retrained reference, which never saw the tasks."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metric_utils import get_metric_name
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation.probes import ProbingMetric, unlearning_of
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.strategy import Strategy


class ReferenceMetric(ProbingMetric):
    """A number per unlearned task, read in the main model and in others beside it.

    Emitted after every evaluation between tasks, per task and as their mean, under the metric's name, and those of the
    other models under the name and a suffix. ``<name>_tasks`` says how many tasks the means cover: those of which
    nothing was kept (``keep_probes=False``) are left out.

    Args:
        references: of the run; None: no comparison.
    """

    def __init__(self, references: References | None) -> None:
        super().__init__()
        self.references = references

    def before_training_exp(self, strategy: Strategy) -> None:
        """Check that what is trained is what the references are trained on."""
        if self.references is not None:
            self.references.check(strategy.experience)

    def values(self, strategy: Strategy, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """The main model's numbers, then those of the others."""
        if self.references is not None:
            self.references.check_labels(unlearning_of(strategy).data)
        main, read, results = strategy.model, {}, []
        for suffix, model in self.models(main, remaining):
            found = {task: self.number(model, main, task, remaining) for task in self.tasks(unlearned, remaining)}
            read[suffix] = {task: number for task, number in found.items() if number is not None}
            results += self.emit_by_task(strategy, f"{self}{suffix}", read[suffix])
        covered = {get_metric_name(f"{self}_tasks", strategy, add_task=False): len(read[""])}
        return [*results, *self.emit(strategy, covered), *self.derived(strategy, read)]

    def tasks(self, unlearned: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
        """Tasks that have a number."""
        return unlearned

    @abstractmethod
    def models(self, main: nn.Module, remaining: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
        """Suffix and model of everything that is read; first the main model, with none."""

    @abstractmethod
    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Number of one task; None where what it needs was not kept.

        Args:
            model: one of :meth:`models`.
            main: the main model.
            task: one of :meth:`tasks`.
            remaining: tasks that both models have.
        """

    def derived(self, strategy: Strategy, read: dict[str, dict[int, float]]) -> list[MetricValue]:
        """Further values, from all that was read: suffix → task → number."""
        return []


class ComparedMetric(ReferenceMetric):
    """A number per unlearned task, of the main model and of the reference, under the same name with ``_reference``.

    Args:
        benchmark: of the run; its streams hold the unlearned tasks' data.
        references: of the run; None: no comparison.

    Raises:
        TypeError: for a benchmark or references that are none.
    """

    helper: str
    """Name of the helper that makes the metric, for messages."""

    def __init__(self, benchmark: Any, references: References | None = None) -> None:
        super().__init__(references)
        if not hasattr(benchmark, "test_stream"):
            raise TypeError(
                f"the first argument is the benchmark: {self.helper}(benchmark, references), got {benchmark!r}"
            )
        if references is not None:
            checks.instance("references", references, References, "References(make_strategy, benchmark), or None")
            references.expect("same")
        self.test_experiences = by_task_label(benchmark.test_stream)

    def models(self, main: nn.Module, remaining: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
        """The main model, and the reference if there is one."""
        yield "", main
        if self.references is not None:
            yield "_reference", self.references.reference(remaining)


def by_task_label(stream: Iterable[Any]) -> dict[int, Any]:
    """Task → its experience in a stream."""
    return {int(experience.task_label): experience for experience in stream}


def some_task_data(experience: Any, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of at most so many of an experience's samples, evenly spread, as its evaluation sees them."""
    n = len(experience.dataset)
    return task_data(experience, None if n <= samples else torch.linspace(0, n - 1, samples).long())
