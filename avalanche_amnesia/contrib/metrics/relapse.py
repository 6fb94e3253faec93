"""Metrics of relapse: test accuracy of new heads, fitted to many or a few samples, on an unlearned task's features."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import some_task_data, targets_of, task_data
from avalanche_amnesia.benchmarks.families import draw_positions
from avalanche_amnesia.contrib.metrics.membership import SAMPLES
from avalanche_amnesia.evaluation.bases import ComparedMetric
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.unlearning.logistic import FitError, fit_head

_SHOTS = 5


def linear_probe_accuracy(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, *, penalty: float = 1.0
) -> float:
    """Return the test accuracy of a multinomial logistic regression fitted to training features; deterministic.

    Linear classifier probes (Alain and Bengio, Understanding intermediate layers, ICLR workshop 2017), fitted to
    whitened features by :func:`~avalanche_amnesia.unlearning.logistic.fit_head` in float64.

    Args:
        train_features: ``(n, features)``, n ≥ 1.
        train_labels: ``(n,)``, int64 from 0 on.
        test_features: ``(m, features)``, m ≥ 1.
        test_labels: ``(m,)``.
        penalty: above 0, on whitened features, as scikit-learn's ``1/C``.

    Returns:
        In [0, 1].

    Raises:
        ValueError: for a penalty of 0 or less.
    """
    checks.above("penalty", penalty, 0)
    n_classes = 1 + int(max(train_labels.max(), test_labels.max()))
    weight, bias = fit_head(train_features.double(), train_labels, n_classes, penalty=penalty, crowded=0)
    return accuracy(test_features.double() @ weight.T + bias, test_labels)


def few_shot_accuracy(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, *, penalty: float = 1e-2
) -> float:
    """Return the test accuracy of a multinomial logistic regression fitted to fewer samples than features.

    The whitening of :func:`linear_probe_accuracy` would amplify directions along which a few samples hardly vary
    (digits with 64 pixels, five samples per class: accuracy .34 instead of .83). So the features are centred and
    divided by a single number, their root mean square, and the penalty applies to the weights themselves.
    Deterministic. Features, labels, result and errors are those of :func:`linear_probe_accuracy`.

    Args:
        penalty: above 0: ``mean cross-entropy + penalty / 2 · ‖W‖²``, bias included.
    """
    checks.above("penalty", penalty, 0)
    n_classes = 1 + int(max(train_labels.max(), test_labels.max()))
    mean = train_features.double().mean(0)
    scale = (train_features.double() - mean).square().mean().sqrt()
    scale = torch.where(scale == 0, 1.0, scale)  # constant features: avoid a division by 0

    def standardise(features: Tensor) -> Tensor:
        return torch.nn.functional.pad((features.double() - mean) / scale, (0, 1), value=1.0)  # 1: for the bias

    train = standardise(train_features)
    weight = _fit_softmax(train, train_labels, n_classes, penalty)
    return accuracy(standardise(test_features) @ weight.T, test_labels)


def _fit_softmax(features: Tensor, labels: Tensor, n_classes: int, penalty: float) -> Tensor:
    """Return weights W that minimise ``mean cross-entropy + penalty / 2 · ‖W‖²``, by L-BFGS from zero."""
    weight = features.new_zeros(n_classes, features.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=30, history_size=30, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = cross_entropy(linear(features, weight), labels) + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    if not bool(weight.isfinite().all()):
        raise FitError("the fitted weights are not finite")
    return weight.detach()


class FreshHead(ComparedMetric):
    """Base class of metrics that fit a new head to an unlearned task's features and return its test accuracy.

    In [0, 1]. This is the accuracy of an attacker with labelled samples of the task (for ``UnlearnedAccuracy`` the
    attacker has only the old head). A good value is close to that of the reference (``<name>_reference``), which
    never saw the task. It is rarely at chance level, because random features separate easy tasks, too. A rise
    after later tasks is a relapse if the reference's value does not rise. The head is fitted, and its accuracy
    emitted, after every evaluation between tasks, per unlearned task and as their mean. ``<name>_tasks`` is the number
    of tasks in these means, which leave out tasks without a kept mask (``keep_probes=False``). Tasks whose features
    have NaN or infinity are left out with a warning.

    Arguments, and errors, are those of :class:`ComparedMetric`.
    """

    reading: Callable[[Tensor, Tensor, Tensor, Tensor], float]
    """Test accuracy of a head fitted to training features ``(n, features)`` and labels ``(n,)``."""

    @abstractmethod
    def samples_of(self, task: int) -> tuple[Tensor, Tensor]:
        """Return the attacker's samples of a task: inputs ``(n, …)`` and labels ``(n,)``."""

    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Fit a new head to features of ``task`` in ``model``; return its test accuracy, or None if fitting fails."""
        (x, y), (test_x, test_y) = self.samples_of(task), task_data(self.test_experiences[task])
        train, test = (self.probed_features(model, main, each, task, remaining, "own") for each in (x, test_x))
        if train is None or test is None:
            return None
        if not bool(train.isfinite().all() and test.isfinite().all()):
            warnings.warn(f"features of task {task} are not finite, no head can be fitted", stacklevel=2)
            return None
        return self.reading(train, y, test, test_y)


class Relapse(FreshHead):
    """Metric of relapse: test accuracy of a linear probe fitted to an unlearned task's training data.

    Emitted as ``Relapse``. At most 10,000 training samples are read, evenly spread. :class:`FreshHead` explains the
    values, arguments and errors.
    """

    helper = "relapse_metrics"
    reading = staticmethod(linear_probe_accuracy)

    def samples_of(self, task: int) -> tuple[Tensor, Tensor]:
        """Return at most 10,000 samples of the task's training data."""
        return some_task_data(self.train_experiences[task], SAMPLES)


class FewShot(FreshHead):
    """Metric of few-shot relearning: test accuracy of a head fitted to a few samples per class of an unlearned task.

    Features trained on a task need few samples, features never trained on it need many. :class:`Relapse` uses many
    samples and so hides the difference. The samples are drawn from the training data by the task: the same ones
    for the model, its reference, and every evaluation. Emitted as ``FewShot``, with other shots as e.g. ``FewShot20``.
    :class:`FreshHead` explains the values.

    Args:
        benchmark, references: as for :class:`FreshHead`.
        shots: number of samples per class, at least 1; all samples of a smaller class.

    Raises:
        ValueError: also if ``shots`` is below 1.
    """

    helper = "few_shot_metrics"
    reading = staticmethod(few_shot_accuracy)

    def __init__(self, benchmark: Any, references: References | None = None, shots: int = _SHOTS) -> None:
        super().__init__(benchmark, references)
        self.shots = checks.whole_number("shots", shots)

    def __str__(self) -> str:
        return "FewShot" if self.shots == _SHOTS else f"FewShot{self.shots}"

    def samples_of(self, task: int) -> tuple[Tensor, Tensor]:
        """Return ``shots`` training samples per class of a task: inputs ``(n, …)`` and labels ``(n,)``."""
        experience, seed = self.train_experiences[task], derive_seed(0, "shots", task)
        labels = targets_of(experience)
        return task_data(experience, draw_positions(labels, dict.fromkeys(labels.unique().tolist(), self.shots), seed))


def relapse_metrics(benchmark: Any, references: References | None = None) -> list[Relapse]:
    """Return a list with the metric :class:`Relapse`: test accuracy of a linear probe on unlearned tasks' features."""
    return [Relapse(benchmark, references)]


def few_shot_metrics(benchmark: Any, references: References | None = None, *, shots: int = _SHOTS) -> list[FewShot]:
    """Return a list with the metric :class:`FewShot`: accuracy of a head fitted to few samples of an unlearned task."""
    return [FewShot(benchmark, references, shots)]
