"""Pure functions: Jensen–Shannon divergence (JSD) of two models' features, and accuracy of logits."""

import math

import torch
from torch import Tensor


def js_divergence(features_a: Tensor, features_b: Tensor) -> Tensor:
    """Return the Jensen–Shannon divergence of the softmax of two feature vectors, per sample, in bits.

    ``JS(p ‖ q) = ½ KL(p ‖ m) + ½ KL(q ‖ m)``, ``m = (p + q)/2``, logarithm to base 2; equal to
    ``scipy.spatial.distance.jensenshannon(p, q, base=2) ** 2``.

    Args:
        features_a: ``(n, features)``, before the softmax.
        features_b: of the shape of ``features_a``.

    Returns:
        ``(n,)`` in float64, each in [0, 1]; 0 for equal vectors, lower is closer.

    Raises:
        ValueError: unless both have one shape ``(n, features)``.

    >>> js_divergence(torch.tensor([[50.0, 0.0]]), torch.tensor([[0.0, 50.0]]))
    tensor([1.], dtype=torch.float64)
    """
    check_pair(features_a, features_b)
    log_p, log_q = features_a.double().log_softmax(1), features_b.double().log_softmax(1)
    p, q = log_p.exp(), log_q.exp()
    # log(p/m) = log 2 − log(1 + q/p), without leaving the logarithm: tiny probabilities do not become log 0, and equal
    # vectors are at 0 to the last bit.
    zero, difference = torch.zeros_like(log_p), log_q - log_p
    log_2 = torch.logaddexp(zero, zero)
    of_p, of_q = log_2 - torch.logaddexp(zero, difference), log_2 - torch.logaddexp(zero, -difference)
    return ((p * of_p + q * of_q).sum(1) / 2 / math.log(2)).clamp(0, 1)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the accuracy, in [0, 1], of ``logits`` ``(n, classes)`` for the ``labels`` ``(n,)``."""
    if len(logits) != len(labels) or len(labels) == 0:
        raise ValueError(f"need as many logits as labels, and some: got {len(logits)} and {len(labels)}")
    return int((logits.argmax(1) == labels).sum()) / len(labels)


def check_pair(features_a: Tensor, features_b: Tensor) -> None:
    """Raise ValueError unless both feature tensors have the same shape ``(n, features)``."""
    if features_a.shape != features_b.shape or features_a.dim() != 2:
        raise ValueError(
            f"give features of one shape (n, features), got {tuple(features_a.shape)}, {tuple(features_b.shape)}"
        )
