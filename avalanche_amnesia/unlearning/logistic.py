"""A linear head fitted to features in a few steps of a second-order method."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def fit_head(
    features: Tensor, labels: Tensor, n_classes: int, *, penalty: float = 1.0, iterations: int = 15
) -> tuple[Tensor, Tensor]:
    """Multinomial logistic regression: ``min mean cross-entropy + penalty / 2n · ‖V‖²``, V over whitened features.

    Whitening makes the problem round, so that a dozen steps of L-BFGS from zero suffice; nothing is drawn.

    Args:
        features: ``(n, features)``.
        labels: ``(n,)``, in ``[0, n_classes)``.
        n_classes: classes of the head; one that has no sample gets a small probability.
        penalty: above 0, as with scikit-learn's ``1/C``.
        iterations: of L-BFGS, at least 1.

    Returns:
        Weight ``(n_classes, features)`` and bias ``(n_classes,)`` of the linear head, on the features' device.
    """
    with torch.no_grad():
        mean = features.mean(0)
        x = features - mean
        covariance = x.T @ x / len(x)
        floor = 1e-4 * covariance.diagonal().mean() + torch.finfo(features.dtype).tiny
        factor = torch.linalg.cholesky(covariance + floor * torch.eye(len(covariance)).to(covariance))
        white = torch.linalg.solve_triangular(factor, x.T, upper=False).T.contiguous()
    weight = white.new_zeros(n_classes, white.shape[1], requires_grad=True)
    bias = white.new_zeros(n_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=iterations, history_size=iterations, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = F.cross_entropy(F.linear(white, weight, bias), labels)
            value = value + penalty / (2 * len(white)) * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        unwhitened = torch.linalg.solve_triangular(factor.T, weight.T, upper=True).T
        return unwhitened.contiguous(), (bias - unwhitened @ mean).contiguous()


def fit_correction(
    features: Tensor, labels: Tensor, logits: Tensor, *, penalty: float = 1e-2, iterations: int = 30
) -> Tensor:
    """What to add to weights that others read too: ``min mean cross-entropy + penalty / 2 · ‖D‖²``, from zero.

    The penalty is on the change itself, not on whitened features as in :func:`fit_head`: directions in which these
    samples hardly vary must not grow, as other tasks' samples vary there.

    Args:
        features: that the weights multiply, ``(n, features)``.
        labels: ``(n,)``.
        logits: as they are without the change, ``(n, classes)``.
        penalty: above 0.
        iterations: of L-BFGS, at least 1.

    Returns:
        ``D``, ``(classes, features)``, on the features' device.
    """
    change = features.new_zeros(logits.shape[1], features.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([change], max_iter=iterations, history_size=iterations, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = F.cross_entropy(logits + F.linear(features, change), labels)
            value = value + penalty / 2 * change.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return change.detach()
