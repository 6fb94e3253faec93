"""Fit a linear head to features in a few steps of L-BFGS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PENALTY = 10.0
"""Best penalty of 1, 10, 100 on validation images of three streams. A small one overfits few samples (20 permuted tasks
of 2,000 images: accuracy .868, .881, .889); a large one underfits many classes (Omniglot: .704, .696, .677)."""


CROWDED = 10.0
"""Variance added to each feature, in mean variances, for 1.5 or more features per sample; none up to .5. Best of 1, 10,
100 on validation images of 1,280 pretrained features: CIFAR-10 .777 without it, .906, .929, .931; Omniglot .613, .751,
.748, .683."""


class FitError(ArithmeticError):
    """Error raised if no head can be fitted, because the features are not finite or their products overflow."""


ITERATIONS = 8
"""Number of L-BFGS steps after the first ones; as accurate as 15 steps on all samples (three validation sets)."""
FIRST_STEPS, FEW = 5, 2500
"""Number of first steps, and the least number of samples they use (at least ten per feature, for whitening)."""
BLOCK = 256
"""Number of features whose products with all later ones are computed at once, half of all if there are many."""
SURE = 0.05
"""A sample counts as certain if its error, ``1 - p`` of the true class, is at most this."""


@torch.no_grad()
def fit_head(
    features: Tensor,
    labels: Tensor,
    n_classes: int,
    *,
    penalty: float = PENALTY,
    iterations: int = ITERATIONS,
    tolerance: float = 3e-5,
    has_bias: bool = True,
    crowded: float = CROWDED,
) -> tuple[Tensor, Tensor]:
    """Fit a linear head: minimise ``mean cross-entropy + penalty/2n · ‖V‖²``, ``V`` the weight on whitened features."""
    # Whitening conditions the problem, so a dozen steps of L-BFGS from zero suffice. A feature that is 0 in all samples
    # (a closed unit) gets weight 0 and is left out.
    n = len(features)
    there = features.any(0).nonzero()[:, 0]  # NaN counts
    rows = features if len(there) == features.shape[1] else features.index_select(1, there)
    few = min(n, max(FEW, 10 * rows.shape[1]))
    # A fixed random draw, because samples may be sorted.
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:few].to(labels.device) if few < n else None
    mean = rows.mean(0) * has_bias  # without a bias nothing could undo the centring
    some, basis = (rows if drawn is None else rows.index_select(0, drawn)) - mean, None
    if n < len(mean):  # the best weights are sums of samples: one coordinate per sample gives the same logits
        basis, coordinates = torch.linalg.qr(some.T)
        some = coordinates.T.contiguous()
    covariance = _lower_gram(some) / few
    one = torch.eye(len(covariance)).to(covariance)
    # Contiguous matrices, so that every device adds in the same order.
    total = covariance.diagonal().contiguous().sum()
    # With few samples for the features, whitening would magnify directions that only these samples have.
    crowded *= min(max(len(mean) / n - 0.5, 0.0), 1.0)
    floor = max(1e-4, crowded) * total / features.shape[1] + torch.finfo(features.dtype).tiny
    factor, failed_at = torch.linalg.cholesky_ex(covariance + floor * one)
    if bool(failed_at) or not bool(covariance.isfinite().all()):
        raise FitError("the features are not finite, or their covariance is rounded too much or overflows")
    whitening = torch.linalg.solve_triangular(factor.contiguous(), one if basis is None else basis.T, upper=False)
    penalties = torch.cat([mean.new_full((len(whitening),), penalty / n), mean.new_zeros(int(has_bias))])
    problem = _Problem(n_classes, whitening, mean, penalties, has_bias)
    search = _Search(n_classes / (1 + n_classes * penalty / n), tolerance)  # the first step is Newton's
    head = rows.new_zeros(n_classes, len(penalties))
    if drawn is None:
        head = search(_Loss(problem, rows, labels), head, FIRST_STEPS + iterations)
    else:
        head = search(_Loss(problem, rows.index_select(0, drawn), labels[drawn]), head, FIRST_STEPS)
        # From here on the gradient of certain samples stays constant, because it hardly changes any more.
        whole = _Loss(problem, rows, labels)
        _, errors = whole.errors(head)
        unsure = largest_errors(-(errors * whole.true).sum(0), SURE, n // 4)
        rest = _Loss(problem, rows.index_select(0, unsure), labels[unsure], n)
        rest.slope_of_others = whole.gradient(errors.index_fill_(1, unsure, 0.0))
        head = search(rest, head, iterations)
    weight, bias = problem.to_features(head)
    of_all = features.new_zeros(n_classes, features.shape[1]).index_copy_(1, there, weight)
    if not all(bool(value.isfinite().all()) for value in (of_all, bias)):
        raise FitError("what was fitted to the features is not finite")
    return of_all, bias[:, 0].contiguous()


def _lower_gram(rows: Tensor) -> Tensor:
    """Return ``rowsᵀ rows`` computed in blocks; blocks above the diagonal stay 0, because Cholesky never reads them."""
    turned = rows.T.contiguous()
    products = rows.new_zeros(len(turned), len(turned))
    for start in range(0, len(turned), BLOCK):
        products[start:, start : start + BLOCK] = turned[start:] @ rows[:, start : start + BLOCK]
    return products


def largest_errors(errors: Tensor, threshold: float, minimum: int) -> Tensor:
    """Return the positions of all errors >= ``threshold``, but at least those of the ``minimum`` largest errors."""
    if minimum >= len(errors):
        return torch.arange(len(errors), device=errors.device)
    # NaN counts as large.
    return (~(errors < errors.kthvalue(len(errors) - minimum + 1).values.clamp_max(threshold))).nonzero()[:, 0]


@dataclass(frozen=True)
class _Problem:
    """Settings of a regularised logistic regression on whitened features: whitening, penalties, bias or not."""

    n_classes: int
    whitening: Tensor
    mean: Tensor
    penalties: Tensor  # of each column of a head: whitened features, then the bias
    has_bias: bool

    def to_features(self, head: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a head to weight ``(classes, features)`` and bias ``(classes, 1)`` for features before whitening."""
        # Whitening the few weights instead of the many samples gives the same logits.
        weight = head[:, : len(self.whitening)].contiguous() @ self.whitening
        bias = head[:, -1:] if self.has_bias else head.new_zeros(len(head), 1)
        return weight, bias - (weight @ self.mean)[:, None]


class _Loss:
    """Mean loss of a head over ``counted`` samples: ``rows`` are evaluated, all others add a fixed gradient."""

    def __init__(self, problem: _Problem, rows: Tensor, labels: Tensor, counted: int | None = None) -> None:
        self._problem, self._rows = problem, rows
        self._counted = len(rows) if counted is None else counted
        self._x = rows.T.contiguous()  # samples last, so that operations per sample run over whole rows
        self._back = problem.whitening.T.contiguous()
        self.true = rows.new_zeros(problem.n_classes, len(rows))
        self.true.index_put_((labels, torch.arange(len(rows)).to(labels)), rows.new_ones(()))
        self.slope_of_others: Tensor | float = 0.0

    def errors(self, head: Tensor) -> tuple[Tensor, Tensor]:
        """Return (mean cross-entropy of a head, probabilities minus one-hot labels ``(classes, samples)``)."""
        weight, bias = self._problem.to_features(head)
        logits = torch.addmm(bias, weight, self._x)
        logits -= logits.amax(0)
        of_true = (logits * self.true).sum()
        odds = logits.exp_()
        total = odds.sum(0)
        return (total.log().sum() - of_true) / self._counted, odds.div_(total).sub_(self.true)

    def gradient(self, errors: Tensor) -> Tensor:
        """Return the gradient of the mean cross-entropy, from ``errors``: probabilities minus one-hot labels."""
        of_bias = errors.sum(1, keepdim=True) / self._counted
        of_weight = torch.addmm(-of_bias * self._problem.mean, errors, self._rows, alpha=1 / self._counted) @ self._back
        return torch.cat([of_weight, of_bias], 1) if self._problem.has_bias else of_weight

    def __call__(self, head: Tensor) -> tuple[float, Tensor]:
        """Return (loss of a head with the penalty, gradient of this loss)."""
        loss, errors = self.errors(head)
        penalised = head * self._problem.penalties
        slope = self.gradient(errors) + penalised + self.slope_of_others
        return float(loss + (penalised / 2 * head + self.slope_of_others * head).sum()), slope


class _Search:
    """L-BFGS optimizer with step halving. It keeps curvature pairs from call to call, even if the loss changes.

    Args:
        scale: length of the first step, as a multiple of the gradient.
        tolerance: stop when a step lowers the loss by no more than this.
    """

    def __init__(self, scale: float, tolerance: float) -> None:
        self._scale, self._tolerance = scale, tolerance
        self._pairs: list[tuple[Tensor, Tensor, float]] = []

    def __call__(self, loss: Callable[[Tensor], tuple[float, Tensor]], head: Tensor, steps: int) -> Tensor:
        """Minimise ``loss`` in at most ``steps`` L-BFGS steps from ``head``, and return the head of the last step."""
        now, slope = loss(head)
        for _ in range(steps):
            direction = self._direction(slope)
            falls = float((direction * slope).sum())
            for length in (1.0, 0.5, 0.25, 0.125, 0.0625):
                there = head.add(direction, alpha=length)
                then, next_slope = loss(there)
                if then <= now + 1e-4 * length * falls:
                    break
            else:
                return head
            step, change = there - head, next_slope - slope
            curvature = float((step * change).sum())
            if curvature > 0:
                self._pairs.append((step, change, curvature))
            fell, head, now, slope = now - then, there, then, next_slope
            if fell <= self._tolerance:
                break
        return head

    def _direction(self, slope: Tensor) -> Tensor:
        left, shares = slope.clone(), list[float]()
        for step, change, curvature in reversed(self._pairs):
            shares.append(float((step * left).sum()) / curvature)
            left.sub_(change, alpha=shares[-1])
        if self._pairs:
            _, change, curvature = self._pairs[-1]
            self._scale = curvature / float(change.square().sum())
        left.mul_(self._scale)
        for (step, change, curvature), share in zip(self._pairs, reversed(shares), strict=True):
            left.add_(step, alpha=share - float((change * left).sum()) / curvature)
        return left.neg_()
