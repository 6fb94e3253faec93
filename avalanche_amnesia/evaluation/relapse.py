"""Relapse: what a fresh linear probe reads of an unlearned task from the features that are left, or came back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation.compared import ComparedMetric, by_task_label, some_task_data
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.probes import ProbeKind
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.unlearning.logistic import fit_head


def linear_probe_accuracy(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, *, penalty: float = 1.0
) -> float:
    """Test accuracy of a multinomial logistic regression fitted to training features; nothing is drawn.

    Linear classifier probes (Alain and Bengio, Understanding intermediate layers, ICLR workshop 2017), fitted to
    whitened features by :func:`~avalanche_amnesia.unlearning.logistic.fit_head` in float64. On features of the main
    job's models it reads at least what scikit-learn's regression on scaled features does, in a sixth of the time.

    Args:
        train_features: ``(n, features)``, n ≥ 1.
        train_labels: ``(n,)``, int64 from 0 on.
        test_features: ``(m, features)``, m ≥ 1.
        test_labels: ``(m,)``.
        penalty: above 0, on whitened features, as scikit-learn's ``1/C``.

    Returns:
        In [0, 1].

    Raises:
        ValueError: for features and labels that do not fit each other, none, or features that are not finite.
    """
    checks.above("penalty", penalty, 0)
    for name, features, labels in (
        ("train", train_features, train_labels),
        ("test", test_features, test_labels),
    ):
        if features.dim() != 2 or labels.shape != features.shape[:1] or len(labels) == 0:
            raise ValueError(
                f"expected {name}_features (n, features) and {name}_labels (n,), n ≥ 1, got {tuple(features.shape)} "
                f"and {tuple(labels.shape)}"
            )
        if not bool(features.isfinite().all()):
            raise ValueError(f"{name}_features must be finite: no probe can be fitted to others")
    n_classes = 1 + int(max(train_labels.max(), test_labels.max()))
    weight, bias = fit_head(train_features.double(), train_labels, n_classes, penalty=penalty)
    return accuracy(test_features.double() @ weight.T + bias, test_labels)


class Relapse(ComparedMetric):
    """Test accuracy of a linear probe on unlearned tasks' features, fitted anew at every evaluation.

    In [0, 1]. What an attacker with the task's training data reads from the model's features, where
    :class:`UnlearnedAccuracy` has the old head alone. Near the same number of the reference
    (``Relapse_reference``), which never saw the task, is good; chance is not to be expected, as random features
    separate easy tasks too. A rise after later tasks, with no such rise in the reference, is a relapse. Emitted after
    every evaluation between tasks, per unlearned task and as their mean, as ``Relapse``; ``Relapse_tasks`` says how
    many tasks these means cover: ``own`` leaves out those of which no mask was kept (``keep_probes=False``), and
    features that are not finite are left out with a warning.

    Args:
        benchmark: of the run; its streams hold the unlearned tasks' data.
        references: of the run; None: no comparison.
        probe: ``own``: through the mask that the task had; ``remaining``: mean features over the masks of the
            remaining tasks. Models without masks use their plain backbone for both.
        samples: at most so many training samples are used, evenly spread, at least 1.

    Raises:
        TypeError: for a benchmark or references that are none.
        ValueError: for a probe that is not known, or fewer than one sample.
    """

    higher_is_better = False
    lower_bound, upper_bound = 0.0, 1.0
    helper = "relapse_metrics"

    def __init__(
        self, benchmark: Any, references: References | None = None, probe: ProbeKind = "own", samples: int = 10_000
    ) -> None:
        super().__init__(benchmark, references)
        self.train_experiences = by_task_label(benchmark.train_stream)
        checks.one_of("probe", probe, ProbeKind)
        self.probe, self.samples = probe, checks.whole_number("samples", samples)

    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Accuracy of a fresh probe; None where there is no mask to look through."""
        (x, y), (test_x, test_y) = (
            some_task_data(self.train_experiences[task], self.samples),
            task_data(self.test_experiences[task]),
        )
        train, test = (self.probed_features(model, main, each, task, remaining, self.probe) for each in (x, test_x))
        if train is None or test is None:
            return None
        if not bool(train.isfinite().all() and test.isfinite().all()):
            warnings.warn(f"features of task {task} are not finite, no linear probe can be fitted", stacklevel=2)
            return None
        return linear_probe_accuracy(train, y, test, test_y)

    def __str__(self) -> str:
        return "Relapse"


def relapse_metrics(
    benchmark: Any, references: References | None = None, *, probe: ProbeKind = "own", samples: int = 10_000
) -> list[Relapse]:
    """Accuracy of fresh linear probes on the unlearned tasks of a benchmark.

    Args:
        benchmark: of the run.
        references: beside it, what the same probes read from the retrained reference; None: not measured.
        probe: ``own`` or ``remaining``, see :class:`Relapse`.
        samples: at most so many training samples of each task.
    """
    return [Relapse(benchmark, references, probe, samples)]
