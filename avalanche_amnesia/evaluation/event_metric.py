"""Bases of metrics whose values come with events: any of them, or every training and unlearning."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metric_utils import get_metric_name

from avalanche_amnesia.strategy import Strategy


class CallbackMetric(PluginMetric):
    """A metric whose values are what its callbacks return."""

    axis = "event"
    """Axis along which a logger draws it: it changes with tasks and unlearnings."""

    def emit(self, strategy: Strategy, named: Mapping[str, Any]) -> list[MetricValue]:
        """The values that there are: those that are not None."""
        x = strategy.clock.train_iterations
        return [MetricValue(self, name, value, x) for name, value in named.items() if value is not None]

    def emit_by_task(
        self, strategy: Strategy, name: str, by_task: Mapping[int, float], mean: float | None = None
    ) -> list[MetricValue]:
        """One value per task and their mean, of an evaluation.

        Args:
            strategy: that is evaluated.
            name: of the values.
            by_task: task → value.
            mean: in the place of the mean of the tasks' values.
        """
        named = {get_metric_name(name, strategy, add_task=task): value for task, value in by_task.items()}
        if by_task:
            of_all = sum(by_task.values()) / len(by_task) if mean is None else mean
            named[get_metric_name(name, strategy, add_task=False)] = of_all
        return self.emit(strategy, named)

    def result(self, strategy: Strategy | None = None) -> None:
        """Only the callbacks emit values."""

    def reset(self, strategy: Strategy | None = None) -> None:
        """Do nothing: no values are accumulated."""


class EventMetric(CallbackMetric, ABC):
    """A metric of the strategy itself, emitted after every training and every unlearning; it needs no evaluation."""

    def after_training_exp(self, strategy: Strategy) -> list[MetricValue]:
        """Values once a task is trained."""
        return self.emit(strategy, self.named(strategy))

    def after_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Values once tasks are unlearned."""
        return self.emit(strategy, self.named(strategy))

    @abstractmethod
    def named(self, strategy: Strategy) -> Mapping[str, Any]:
        """Name → value, as the strategy stands; None for a value that it does not have."""
