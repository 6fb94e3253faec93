"""Base of metrics of a strategy as it stands after every training and unlearning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue


class EventMetric(PluginMetric, ABC):
    """A metric of the strategy itself, emitted after every training and every unlearning; it needs no evaluation."""

    axis = "event"
    """Axis along which a logger draws it: it changes with tasks and unlearnings."""

    def after_training_exp(self, strategy: Any) -> list[MetricValue]:
        """Values once a task is trained."""
        return self.emit(strategy, self.named(strategy))

    def after_unlearning(self, strategy: Any) -> list[MetricValue]:
        """Values once tasks are unlearned."""
        return self.emit(strategy, self.named(strategy))

    @abstractmethod
    def named(self, strategy: Any) -> Mapping[str, Any]:
        """Name → value, as the strategy stands; None for a value that it does not have."""

    def emit(self, strategy: Any, named: Mapping[str, Any]) -> list[MetricValue]:
        """The values that there are."""
        x = strategy.clock.train_iterations
        return [MetricValue(self, name, value, x) for name, value in named.items() if value is not None]

    def result(self, strategy: Any = None) -> None:
        """Values are emitted by the callbacks alone."""

    def reset(self, strategy: Any = None) -> None:
        """Do nothing: no values are accumulated."""
