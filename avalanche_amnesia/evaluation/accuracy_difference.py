"""Accuracy difference: how unlearning changes the other tasks' accuracy, against a model that unlearned nothing."""

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from avalanche.evaluation.metric_results import MetricValue
from avalanche.models import avalanche_forward
from torch import Tensor, nn
from torch.nn import functional as F

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import some_task_data
from avalanche_amnesia.evaluation.bases import CallbackMetric, prove_last_record, require_unlearning
from avalanche_amnesia.evaluation.probes import task_features
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.unit_graph.backbones import evaluation_mode
from avalanche_amnesia.unlearning.logistic import FitError, fit_head

Control = Literal["heads", "reference"]

_NAMES = {
    "main": "AccuracyDifference",
    "heads": "AccuracyDifference_control",
    "reference": "AccuracyDifference_reference",
}


class AccuracyDifference(CallbackMetric):
    """Metric: mean accuracy on tasks not unlearned, minus that of a model that learned all tasks and unlearned none.

    ``AD_t = 1/|R(t)| Σ_{τ∈R(t)} (a_τ − a_τ^full)``, where ``R(t)`` are the remaining tasks, ``a_τ`` is the accuracy
    on task τ, and ``a_τ^full`` that of the full model. In [−1, 1], higher is better.
    Positive: the freed capacity helped, or new heads did: an unlearning that fits heads again (counterfactual heads)
    gains as much as any fresh fit. The control ``heads`` separates the two effects: ``a_τ`` is then the full model's
    accuracy with the head of τ fitted again to its final features of the training data, nothing unlearned. The control
    ``reference`` uses the retrained model in place of the main one: the gain of never training the unlearned tasks.
    Emitted after every evaluation between tasks, per remaining task among those evaluated and as their mean, as
    ``AccuracyDifference``, ``AccuracyDifference_control`` (heads) and ``AccuracyDifference_reference``; with
    them the accuracies ``Accuracy_full`` and ``Accuracy_reference`` of the compared models.

    Args:
        references: reference models of the run.
        controls: which of ``heads`` (a head per remaining task is fitted at every evaluation) and ``reference`` (which
            costs a reference of the remaining tasks, unless another metric has it).
        samples: at most so many of a task's training samples are used to fit its head, evenly spread, at least 1.

    Attributes:
        accuracies: of the last evaluation: ``main``, ``full``, ``heads``, ``reference`` → remaining task → accuracy.
        differences: of the last evaluation: ``main``, ``heads``, ``reference`` → remaining task → accuracy minus that
            of the full model.

    Raises:
        TypeError: if ``references`` is not a :class:`References`.
        ValueError: for an unknown control, or fewer than one sample.
    """

    higher_is_better = True
    lower_bound, upper_bound = -1.0, 1.0

    def __init__(self, references: References, controls: Sequence[Control] = (), samples: int = 10_000) -> None:
        super().__init__()
        checks.instance("references", references, References, "References(make_strategy, benchmark)")
        for control in controls:
            checks.one_of("controls", control, Control)
        self.samples = checks.whole_number("samples", samples)
        self.references, self.controls = references, tuple(controls)
        references.expect("full")
        if "reference" in controls:
            references.expect("same")
        self.accuracies: dict[str, dict[int, float]] = {}
        self.differences: dict[str, dict[int, float]] = {}
        self._right: dict[str, dict[int, int]] = {}
        self._seen: dict[int, int] = {}
        self._heads: dict[int, tuple[Tensor, Tensor] | None] = {}

    def before_training_exp(self, strategy: Strategy) -> None:
        """Before a task's training: raise an error if its data differ from those the reference models retrain on."""
        self.references.check(strategy.experience)

    def before_eval(self, strategy: Strategy) -> None:
        """Before an evaluation: reset counts; raise an error if the run's class labels differ from the references'."""
        self.references.trained(require_unlearning(strategy))
        self.reset()

    def after_eval_iteration(self, strategy: Strategy) -> None:
        """After an evaluation mini-batch: count correct predictions of the main model and of all reference models."""
        plugin = require_unlearning(strategy)
        task = int(strategy.experience.task_label)
        if plugin.current_task is not None or task not in plugin.ledger.remaining:
            return
        full = self.references.trained(plugin).full(plugin.trained).to(strategy.device)
        outputs = {"main": strategy.mb_output, "full": _logits(full, strategy)}
        if "reference" in self.controls:
            reference = self.references.of(plugin).reference(plugin.ledger.remaining).to(strategy.device)
            outputs["reference"] = _logits(reference, strategy)
        if "heads" in self.controls:
            if task not in self._heads:
                self._heads[task] = self._refit_head(full, task)
            head = self._heads[task]
            if head is not None:
                features = task_features(full, strategy.mb_x, task).double()
                outputs["heads"] = F.linear(features, *head).to(strategy.device)
        for who, output in outputs.items():
            right = self._right.setdefault(who, {})
            right[task] = right.get(task, 0) + int((torch.argmax(output, 1) == strategy.mb_y).sum())
        self._seen[task] = self._seen.get(task, 0) + len(strategy.mb_y)

    def after_eval(self, strategy: Strategy) -> list[MetricValue] | None:
        """After an evaluation: return accuracies and their differences from a model that unlearned nothing; or None."""
        self._heads = {}  # fitted to features of tasks that may be unlearned next
        if "reference" in self._right:
            prove_last_record(strategy, self.references)
        self.accuracies = {
            who: {task: n / self._seen[task] for task, n in right.items()} for who, right in self._right.items()
        }
        self.differences = {
            who: {task: (n - self._right["full"][task]) / self._seen[task] for task, n in self._right[who].items()}
            for who in _NAMES
            if who in self._right
        }
        named = {f"Accuracy_{who}": self.accuracies.get(who, {}) for who in ("full", "reference")}
        named |= {_NAMES[who]: by_task for who, by_task in self.differences.items()}
        values = [value for name, by_task in named.items() for value in self.emit_by_task(strategy, name, by_task)]
        return values or None

    def _refit_head(self, full: nn.Module, task: int) -> tuple[Tensor, Tensor] | None:
        """Fit (weight, bias) of a new head to ``task``'s features in ``full`` (nothing unlearned); None on failure."""
        x, y = some_task_data(self.references.train_experience(task), self.samples)
        try:
            return fit_head(task_features(full, x, task).double(), y, int(y.max()) + 1)
        except FitError as error:
            warnings.warn(f"no control for the accuracy difference of task {task}: {error}", stacklevel=2)
            return None

    def reset(self, strategy: Strategy | None = None) -> None:
        """Delete all counts, fitted heads and results of the last evaluation."""
        self.accuracies, self.differences = {}, {}
        self._right, self._seen, self._heads = {}, {}, {}


def _logits(model: nn.Module, strategy: Strategy) -> Tensor:
    with evaluation_mode(model):
        return avalanche_forward(model, strategy.mb_x, strategy.mb_task_id)


def accuracy_difference_metrics(
    references: References, *, controls: Sequence[Control] = ("heads",)
) -> list[AccuracyDifference]:
    """Return a list with the metric :class:`AccuracyDifference`; arguments as for the class."""
    return [AccuracyDifference(references, controls)]
