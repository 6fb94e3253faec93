"""Optional metrics of the distance between features: Euclidean, cosine and CKA."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from avalanche_amnesia.evaluation.bases import FeatureDistance, Floor
from avalanche_amnesia.evaluation.functional import check_pair
from avalanche_amnesia.evaluation.references import References


def euclidean_distance(features_a: Tensor, features_b: Tensor) -> Tensor:
    """Return the Euclidean distance per sample of two tensors ``(n, features)``: float64 ``(n,)``, lower is closer."""
    check_pair(features_a, features_b)
    return (features_a.double() - features_b.double()).norm(dim=1)


def cosine_distance(features_a: Tensor, features_b: Tensor) -> Tensor:
    """Return ``1 − cos`` per sample of two tensors ``(n, features)``: float64 ``(n,)`` in [0, 2], lower is closer.

    Equal vectors, even zero vectors, have distance exactly 0. A zero vector and a nonzero one have distance 1.
    """
    check_pair(features_a, features_b)
    a, b = features_a.double(), features_b.double()
    similarity = torch.nn.functional.cosine_similarity(a, b, dim=1)
    return torch.where((a == b).all(1), 0.0, (1 - similarity).clamp(0, 2))


def cka_distance(features_a: Tensor, features_b: Tensor) -> Tensor:
    """Return ``1 − linear CKA`` of two sets of features ``(n, features)``: float64 ``()`` in [0, 1], lower is closer.

    ``CKA = ‖B̄ᵀĀ‖² / (‖ĀᵀĀ‖ ‖B̄ᵀB̄‖)`` of centred features. Pass the whole test set: on small batches unrelated
    features seem close. The distance is exactly 0 if the centred features are equal, so for two constant sets too.
    """
    check_pair(features_a, features_b)
    a = features_a.double() - features_a.double().mean(0)
    b = features_b.double() - features_b.double().mean(0)
    own = (a.T @ a).norm() * (b.T @ b).norm()
    if torch.equal(a, b) or own == 0:
        return torch.tensor(0.0 if torch.equal(a, b) else 1.0, dtype=torch.float64)
    return (1 - (b.T @ a).norm() ** 2 / own).clamp(0, 1)


class OtherDistance(FeatureDistance):
    """Metric of the mean Euclidean, cosine or CKA distance between the main model's and the retrained model's features.

    ``euclidean``: ``‖f(x) − f_ref(x)‖``, at least 0, without an upper bound; it grows with the scale of the features.
    ``cosine``: ``1 − cos(f(x), f_ref(x))``, in [0, 2]; invariant to scale. ``cka``: ``1 − linear CKA``, in [0, 1];
    invariant to rotation, scale and shift (Kornblith et al., Similarity of neural network representations revisited,
    ICML 2019). Emitted as ``Euclidean_own``, ``Cosine_own``, ``CKA_own``, see :class:`FeatureDistance`.

    Args:
        kind: ``euclidean``, ``cosine`` or ``cka``.
        references, noise_floor: see :class:`FeatureDistance`, also for the errors.
    """

    def __init__(self, kind: str, references: References, noise_floor: Sequence[Floor] = ()) -> None:
        super().__init__(references, noise_floor=noise_floor)
        self.name, self.upper_bound, self._by_sample = _DISTANCES[kind]

    def distance(self, features_a: Tensor, features_b: Tensor) -> float:
        """Return the mean distance over samples (CKA: of the whole set) between features ``(n, features)``."""
        return float(self._by_sample(features_a, features_b).mean())


_DISTANCES: dict[str, tuple[str, float, Callable[[Tensor, Tensor], Tensor]]] = {
    "euclidean": ("Euclidean", float("inf"), euclidean_distance),
    "cosine": ("Cosine", 2.0, cosine_distance),
    "cka": ("CKA", 1.0, cka_distance),
}


def distance_metrics(references: References, *, noise_floor: Sequence[Floor] = ("order",)) -> list[OtherDistance]:
    """Return the Euclidean, cosine and CKA metrics (:class:`OtherDistance`) of features through each task's own mask.

    Args:
        references: the run's references.
        noise_floor: floors to emit for each distance, ``order`` or ``seed``; each trains one more reference.

    Raises:
        TypeError: if ``references`` is not a :class:`References`.
        ValueError: for an unknown name.
    """
    return [OtherDistance(kind, references, noise_floor) for kind in _DISTANCES]
