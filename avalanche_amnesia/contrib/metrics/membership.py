"""Metrics of membership inference: an attacker separates unlearned samples from test samples by their losses."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from avalanche.evaluation.metric_results import MetricValue
from torch import Tensor, nn
from torch.nn import functional as F

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import some_task_data, task_data
from avalanche_amnesia.evaluation.bases import ComparedMetric, require_unlearning
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.unit_graph.backbones import in_batches

Kind = Literal["accuracy", "membership"]
SAMPLES = 10_000
"""Largest number of a task's training samples that a metric reads, evenly spread."""


def membership_auc(member_losses: Tensor, other_losses: Tensor) -> float:
    """Return the AUC (area under the ROC curve) of an attack that classifies samples with a small loss as members.

    ``AUC = P(ℓ_member < ℓ_other) + ½ P(ℓ_member = ℓ_other)`` (loss threshold: Yeom et al., Privacy risk in machine
    learning, CSF 2018); equal to scikit-learn's ``roc_auc_score`` of the negative losses. Losses of training samples
    ``(n,)`` and of other samples ``(m,)``, n and m ≥ 1, infinity allowed → in [0, 1]: 0.5 for uninformative losses, 1
    if every member's loss is smaller. ``ValueError`` for losses of another shape, empty losses, or NaN.
    """
    for name, losses in (("member_losses", member_losses), ("other_losses", other_losses)):
        if losses.dim() != 1 or len(losses) == 0 or bool(losses.isnan().any()):
            raise ValueError(f"{name} must be (n,), n ≥ 1, without NaN, got {losses}")
    others = other_losses.double().sort().values
    members = member_losses.double()
    smaller, up_to = (torch.searchsorted(others, members, right=right) for right in (False, True))
    return 1 - float((smaller + up_to).sum()) / (2 * len(members) * len(others))


class MembershipInference(ComparedMetric):
    """Metric of membership inference: AUC of separating an unlearned task's training and test samples by loss.

    In [0, 1], 0.5 for losses that do not separate them. Losses are cross-entropies through the task's former head and
    mask, which the evaluation stores, of at most 10,000 training samples. A good value is close to that of the
    reference (``Membership_reference``), which never saw the task; it may differ from 0.5 because the two sets differ
    and the former head was trained on one of them. Emitted after every evaluation between tasks as ``Membership``, per
    unlearned task and as their mean. ``Membership_tasks`` is the number of tasks in these means. Tasks without a probe
    (``keep_probes=False``) or with infinite or NaN logits are left out.

    Args:
        benchmark: the run's benchmark; its streams contain the unlearned tasks' data.
        references: the run's references; None: no comparison.

    Raises:
        TypeError: if ``benchmark`` or ``references`` has another type.

    Reference: Yeom et al., Privacy risk in machine learning: analyzing the connection to overfitting, CSF 2018.
    """

    helper = "membership_metrics"

    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Return the AUC of the task's training losses against its test losses; None without finite logits."""
        losses = []
        train = some_task_data(self.train_experiences[task], SAMPLES)
        for x, y in (train, task_data(self.test_experiences[task])):
            logits = self.probed_logits(model, x, task)
            if logits is None or not bool(logits.isfinite().all()):
                return None
            losses.append(F.cross_entropy(logits.double(), y, reduction="none"))
        return membership_auc(*losses)

    def __str__(self) -> str:
        return "Membership"


def membership_metrics(benchmark: Any, references: References | None = None) -> list[MembershipInference]:
    """Return the metric of membership inference on unlearned tasks; arguments as for :class:`MembershipInference`."""
    return [MembershipInference(benchmark, references)]


class ForgottenSamples(ComparedMetric):
    """Metric on samples unlearned from tasks that stay: accuracy, or AUC of separating them from test samples by loss.

    In [0, 1]. A good value is that of the reference, which never saw the samples (the same name with ``_reference``);
    after an exact unlearning the two are equal. An AUC of 0.5 means uninformative losses. Test samples are those of
    the unlearned samples' classes. Emitted after every evaluation between tasks, per task that lost samples and as
    their mean, as ``ForgottenSamples_accuracy`` or ``ForgottenSamples_membership``.

    Args:
        benchmark: the run's benchmark; its streams contain the tasks' data.
        references: the run's references; None: no comparison.
        kind: ``accuracy`` or ``membership``.

    Raises:
        TypeError: if ``benchmark`` or ``references`` has another type.
        ValueError: for another kind.
    """

    helper = "forgotten_samples_metrics"
    of_parts = True

    def __init__(self, benchmark: Any, references: References | None = None, kind: Kind = "accuracy") -> None:
        super().__init__(benchmark, references)
        checks.one_of("kind", kind, Kind)
        self.kind = kind
        self._positions: dict[int, list[int]] = {}

    def values(self, strategy: Strategy, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """Return the metric on each task's unlearned samples, and its mean over these tasks."""
        sizes = {task: len(experience.dataset) for task, experience in self.train_experiences.items()}
        self._positions = require_unlearning(strategy).forgotten.positions_by_task(sizes)
        return super().values(strategy, unlearned, remaining)

    def tasks(self, unlearned: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
        """Return the tasks to measure: those with unlearned samples."""
        return list(self._positions)

    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Return accuracy or AUC (``self.kind``) on a task's unlearned samples; None if an AUC lacks test samples."""
        x, y = task_data(self.train_experiences[task], torch.tensor(self._positions[task]))
        logits = partial(in_batches, model, run=lambda part: model(part, task))
        if self.kind == "accuracy":
            return accuracy(logits(x), y)
        other_x, other_y = task_data(self.test_experiences[task])
        alike = torch.isin(other_y, y)
        if not bool(alike.any()):
            return None
        both = ((x, y), (other_x[alike], other_y[alike]))
        losses = (F.cross_entropy(logits(x).double(), y, reduction="none") for x, y in both)
        return membership_auc(*losses)

    def __str__(self) -> str:
        return f"ForgottenSamples_{self.kind}"


def forgotten_samples_metrics(benchmark: Any, references: References | None = None) -> list[ForgottenSamples]:
    """Return the metrics on samples unlearned from tasks that stay; arguments as for :class:`ForgottenSamples`."""
    return [ForgottenSamples(benchmark, references, "accuracy"), ForgottenSamples(benchmark, references, "membership")]
