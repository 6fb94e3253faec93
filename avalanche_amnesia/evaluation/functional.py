"""JSD of two models' features, distances in units of their floor and in words, accuracy of logits: pure functions."""

import math

import torch
from torch import Tensor


def js_divergence(features_a: Tensor, features_b: Tensor) -> Tensor:
    """Jensen–Shannon divergence of the softmax of two feature vectors per sample, in bits.

    ``JS(p ‖ q) = ½ KL(p ‖ m) + ½ KL(q ‖ m)``, ``m = (p + q)/2``, logarithm to base 2; equal to
    ``scipy.spatial.distance.jensenshannon(p, q, base=2) ** 2``.

    Args:
        features_a: ``(n, features)``, before the softmax.
        features_b: of the same shape.

    Returns:
        ``(n,)`` in float64, each in [0, 1]; 0 for equal vectors, lower is closer.

    Raises:
        ValueError: unless both have one shape ``(n, features)``.

    >>> js_divergence(torch.tensor([[50.0, 0.0]]), torch.tensor([[0.0, 50.0]]))
    tensor([1.], dtype=torch.float64)
    """
    check_pair(features_a, features_b)
    rows = max(1, _BLOCK // max(1, features_a.shape[1]))
    blocks = zip(features_a.split(rows), features_b.split(rows), strict=True)
    return torch.cat([_js_divergence(a, b) for a, b in blocks])


_BLOCK = 2**15
"""Entries that are looked at together: what is made of so many stays in a processor's cache, a third of the time."""


def _js_divergence(features_a: Tensor, features_b: Tensor) -> Tensor:
    log_p, log_q = features_a.double().log_softmax(1), features_b.double().log_softmax(1)
    p, q = log_p.exp(), log_q.exp()
    # log(p/m) = log 2 − log(1 + q/p), without leaving the logarithm: tiny probabilities do not become log 0, and equal
    # vectors are at 0 to the last bit.
    zero, difference = torch.zeros_like(log_p), log_q - log_p
    log_2 = torch.logaddexp(zero, zero)
    of_p, of_q = log_2 - torch.logaddexp(zero, difference), log_2 - torch.logaddexp(zero, -difference)
    return ((p * of_p + q * of_q).sum(1) / 2 / math.log(2)).clamp(0, 1)


RESOLUTION = 1e-9
"""Distances below it are rounding: they are told from no other, and give no ratio. In bits, of the JSD."""


def floor_ratio(distance: float, floor: float) -> float | None:
    """Distance in units of its noise floor: 1 is as far as two models that never saw the task lie apart.

    Args:
        distance: between the model and the retrained one, at least 0.
        floor: the same distance between two retrained models, at least 0.

    Returns:
        ``distance / floor``; None where either is below :data:`RESOLUTION` (two models with the same bits, or with
        sums in another order): rounding is no unit, and no multiple of one.

    Raises:
        ValueError: for a negative distance or floor.

    >>> floor_ratio(0.036, 0.02), floor_ratio(0.0, 0.02), floor_ratio(0.01, 1e-17)
    (1.7999999999999998, None, None)
    """
    if distance < 0 or floor < 0:
        raise ValueError(f"a distance and its floor are at least 0, got {distance} and {floor}")
    return None if min(distance, floor) < RESOLUTION else distance / floor


def distance_in_words(distance: float) -> str:
    """A distance with two significant digits; ``below detection`` under :data:`RESOLUTION`.

    >>> distance_in_words(0.0108), distance_in_words(5e-5), distance_in_words(3e-17)
    ('0.011', '5.0e-5', 'below detection')
    """
    return "below detection" if distance < RESOLUTION else two_digits(distance)


def two_digits(value: float) -> str:
    """A number from 0 on with two significant digits.

    >>> two_digits(0.5), two_digits(1.04), two_digits(149.448), two_digits(0)
    ('0.50', '1.0', '150', '0')
    """
    if value == 0:
        return "0"
    digits = f"{value:.1e}"
    if value < 1e-3:
        return digits.replace("e-0", "e-")
    return f"{float(digits):,.{max(0, 1 - int(digits[4:]))}f}"


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of samples whose largest logit is their label: ``(n, classes)``, ``(n,)`` → in [0, 1]."""
    if len(logits) != len(labels) or len(labels) == 0:
        raise ValueError(f"need as many logits as labels, and some: got {len(logits)} and {len(labels)}")
    return int((logits.argmax(1) == labels).sum()) / len(labels)


def check_pair(features_a: Tensor, features_b: Tensor) -> None:
    """Check that features are those of the same samples."""
    if features_a.shape != features_b.shape or features_a.dim() != 2:
        raise ValueError(
            f"expected two feature tensors of one shape (n, features), got {tuple(features_a.shape)} and "
            f"{tuple(features_b.shape)}"
        )
