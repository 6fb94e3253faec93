"""Accuracy and membership on samples that remaining tasks forgot, beside a model that never had them."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from avalanche.evaluation.metric_results import MetricValue
from torch import nn
from torch.nn import functional as F

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.metrics.membership import membership_auc
from avalanche_amnesia.evaluation.bases import ComparedMetric, by_task_label, unlearning_of
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.probes import task_features
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.strategy import Strategy

Kind = Literal["accuracy", "membership"]


class ForgottenSamples(ComparedMetric):
    """Accuracy on forgotten samples of remaining tasks, or the AUC with which their losses tell them from test samples.

    In [0, 1]. Good is the number of the reference, which never had the samples (the same name with ``_reference``);
    where the unlearning is exact, the two are equal. An AUC of 0.5 says that losses tell nothing; test samples are
    those of the forgotten samples' classes. Emitted after every evaluation between tasks, per task that lost samples
    and as their mean, as ``ForgottenSamples_accuracy`` or ``ForgottenSamples_membership``.

    Args:
        benchmark: of the run; its streams hold the tasks' data.
        references: of the run; None: no comparison.
        kind: ``accuracy`` or ``membership``.

    Raises:
        TypeError: for a benchmark or references that are none.
        ValueError: for another kind.
    """

    higher_is_better = False
    lower_bound, upper_bound = 0.0, 1.0
    helper = "forgotten_samples_metrics"
    of_parts = True

    def __init__(self, benchmark: Any, references: References | None = None, kind: Kind = "accuracy") -> None:
        super().__init__(benchmark, references)
        checks.one_of("kind", kind, Kind)
        self.kind = kind
        self.train_experiences = by_task_label(benchmark.train_stream)
        self._positions: dict[int, list[int]] = {}

    def values(self, strategy: Strategy, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """As the base class's."""
        sizes = {task: len(experience.dataset) for task, experience in self.train_experiences.items()}
        self._positions = unlearning_of(strategy).forgotten.left_out(sizes)
        return super().values(strategy, unlearned, remaining)

    def tasks(self, unlearned: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
        """Those that lost samples."""
        return list(self._positions)

    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Number of one task; None where no test sample is of the forgotten ones' classes."""
        x, y = task_data(self.train_experiences[task], torch.tensor(self._positions[task]))
        if self.kind == "accuracy":
            return accuracy(self._logits(model, x, task), y)
        other_x, other_y = task_data(self.test_experiences[task])
        alike = torch.isin(other_y, y)
        if not bool(alike.any()):
            return None
        both = ((x, y), (other_x[alike], other_y[alike]))
        losses = (F.cross_entropy(self._logits(model, x, task).double(), y, reduction="none") for x, y in both)
        return membership_auc(*losses)

    def _logits(self, model: Any, x: torch.Tensor, task: int) -> torch.Tensor:
        features = task_features(model, x, task)
        with torch.no_grad():
            logits: torch.Tensor = model.head(task)(features.to(next(model.parameters()).device)).cpu()
        return logits

    def __str__(self) -> str:
        return f"ForgottenSamples_{self.kind}"


def forgotten_samples_metrics(benchmark: Any, references: References | None = None) -> list[ForgottenSamples]:
    """Accuracy and membership inference on samples that remaining tasks forgot; arguments of the class."""
    return [ForgottenSamples(benchmark, references, "accuracy"), ForgottenSamples(benchmark, references, "membership")]
