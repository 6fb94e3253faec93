"""A linear head fitted to features in a few steps of a second-order method."""

import torch
from torch import Tensor
from torch.nn import functional as F

PENALTY = 10.0
"""Of 1, 10 and 100 the best in sum on validation images of three streams: a weak one overfits few samples (20 permuted
tasks of 2,000 images: accuracy .868, .881, .889), a strong one underfits many classes (Omniglot: .704, .696, .677)."""


class FitError(ArithmeticError):
    """No head can be fitted: the features are not finite, or so large that they overflow when multiplied."""


def fit_head(
    features: Tensor,
    labels: Tensor,
    n_classes: int,
    *,
    penalty: float = PENALTY,
    iterations: int = 15,
    tolerance: float = 3e-5,
    has_bias: bool = True,
) -> tuple[Tensor, Tensor]:
    """Multinomial logistic regression: ``min mean cross-entropy + penalty / 2n · ‖V‖²``, V over whitened features."""
    # Whitening makes the problem round, so that a dozen steps of L-BFGS from zero suffice; nothing is drawn. A feature
    # that is 0 in all samples, as those of closed units are, has weight 0, and takes no part.
    n = len(features)
    with torch.no_grad():
        there = features.abs().amax(0).nonzero()[:, 0]  # a tenth of the time of counting; of NaN it is NaN
        rows = features.index_select(1, there)
        mean = rows.mean(0) * has_bias  # without a bias nothing could undo the centring
        rows -= mean
        x = rows.T.contiguous()  # samples last: what is done per sample runs over whole rows
        covariance = x @ rows / n
        one = torch.eye(len(covariance)).to(covariance)
        # Matrices that lie alike, so that every device adds in the same order.
        total = covariance.diagonal().contiguous().sum()
        floor = 1e-4 * total / features.shape[1] + torch.finfo(features.dtype).tiny
        if not bool(covariance.isfinite().all()):
            raise FitError("the features are not finite, or their covariance overflows")
        factor, failed_at = torch.linalg.cholesky_ex(covariance + floor * one)
        if bool(failed_at):
            raise FitError("the features' covariance has no Cholesky factor, rounded as it is")
        whitening = torch.linalg.solve_triangular(factor.contiguous(), one, upper=False)
        true = x.new_zeros(n_classes, n).index_put_((labels, torch.arange(n).to(labels)), x.new_ones(()))
        weight, bias = x.new_zeros(n_classes, len(x)), x.new_zeros(n_classes, 1)
    optimizer = torch.optim.LBFGS(
        [weight, bias] if has_bias else [weight],
        max_iter=iterations,
        history_size=iterations,
        tolerance_change=tolerance,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()
    def loss() -> Tensor:  # its gradient by hand takes a third of autograd's time
        # The few weights are whitened in place of the many samples, which comes to the same.
        logits = torch.addmm(bias, weight @ whitening, x)
        logits -= logits.amax(0)
        of_true = (logits * true).sum()
        odds = logits.exp_()
        total = odds.sum(0)
        error = odds.div_(total).sub_(true).div_(n)
        weight.grad = torch.addmm(weight, error @ x.T, whitening.T, beta=penalty / n)
        bias.grad = error.sum(1, keepdim=True)
        return (total.log().sum() - of_true) / n + penalty / (2 * n) * weight.square().sum()

    optimizer.step(loss)
    with torch.no_grad():
        unwhitened = weight @ whitening
        shift = bias[:, 0] - unwhitened @ mean
        of_all = features.new_zeros(n_classes, features.shape[1]).index_copy_(1, there, unwhitened)
    _check_fit(of_all, shift)
    return of_all, shift.contiguous()


def _check_fit(*found: Tensor) -> None:
    if not all(bool(value.isfinite().all()) for value in found):
        raise FitError("what was fitted to the features is not finite")


def fit_correction(features: Tensor, labels: Tensor, logits: Tensor, *, penalty: float = 1e-2) -> Tensor:
    """Correction of weights that others read too: ``min mean cross-entropy + penalty / 2 · ‖D‖²``, from zero."""
    # The penalty is on the change itself, not on whitened features as in ``fit_head``: directions in which these
    # samples hardly vary must not grow, as other tasks' samples vary there.
    change = features.new_zeros(logits.shape[1], features.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([change], max_iter=30, history_size=30, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = F.cross_entropy(logits + F.linear(features, change), labels)
            value = value + penalty / 2 * change.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    _check_fit(change, loss().detach())
    return change.detach()
