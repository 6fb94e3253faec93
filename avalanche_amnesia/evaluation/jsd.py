"""Jensen–Shannon divergence (JSD) between features of the main model and of the retrained reference model."""

from collections.abc import Sequence
from typing import get_args

from torch import Tensor, nn

from avalanche_amnesia.evaluation.bases import FeatureDistance, Floor, Scope
from avalanche_amnesia.evaluation.functional import js_divergence
from avalanche_amnesia.evaluation.probes import Probe, ProbeKind, features_of
from avalanche_amnesia.evaluation.references import References


class JSDivergence(FeatureDistance):
    """Mean Jensen–Shannon divergence, in bits, between features of the main and the retrained model on unlearned tasks.

    ``JSD_t = 1/|U(t)| Σ_{τ∈U(t)} 1/|D^τ| Σ_{x∈D^τ} JS( softmax f(x) ‖ softmax f_ref(x) )``: ``U(t)`` are the tasks
    unlearned so far, ``D^τ`` is the test data of task τ, ``f`` and ``f_ref`` are the features of the main model and of
    the reference, which learned only the remaining tasks. In place of ``U(t)``, ``scope`` takes other tasks.

    In [0, 1]. Emitted as ``JSD_<probe>``; arguments, floors, ``JSD_<probe>_ratio_order`` and what
    ``JSD_<probe>_tasks`` counts are those of :class:`FeatureDistance`. Read the old head
    (:func:`~avalanche_amnesia.evaluation.unlearned_accuracy_metrics`) as well: a JSD can't show small residues.
    """

    name, upper_bound = "JSD", 1.0

    def distance(self, features_a: Tensor, features_b: Tensor) -> float:
        """Return the mean JSD over samples of two models' features, each ``(n, features)``."""
        return float(js_divergence(features_a, features_b).mean())


def jsd_metrics(
    references: References,
    *,
    probes: Sequence[ProbeKind] = get_args(ProbeKind),
    noise_floor: Sequence[Floor] = ("order",),
    scope: Scope = "unlearned",
) -> list[JSDivergence]:
    """Return Jensen–Shannon divergence metrics, one per kind of probe (the mask through which features are compared).

    Args:
        references: reference models of the run.
        probes: which of ``own``, ``remaining`` and ``none``.
        noise_floor: floors to emit for each probe, ``order`` or ``seed``; each one costs another reference.
        scope: ``unlearned``, ``remaining`` or ``all``, see :class:`FeatureDistance`.
    """
    return [JSDivergence(references, probe, noise_floor, scope) for probe in probes]


def jsd(model: nn.Module, reference: nn.Module, x: Tensor, probe: Probe | None = None) -> float:
    """Return the mean Jensen–Shannon divergence (JSD), in bits, between two models' features of the inputs ``x``.

    Args:
        model: any model that :func:`features_of` takes.
        reference: any such model, to compare with.
        x: inputs ``(n, …)``.
        probe: a task's mask and norms, used in both models (:func:`copy_probe`); None: the plain backbones.
    """
    mask, parts = (None, None) if probe is None else (probe.mask, probe.parts)
    features = [features_of(each, x, mask, parts=parts) for each in (model, reference)]
    return float(js_divergence(*features).mean())
