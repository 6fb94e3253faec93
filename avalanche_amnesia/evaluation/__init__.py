"""Metrics of forgetting on request, against retrained references."""

from avalanche_amnesia.evaluation.accuracy_difference import AccuracyDifference, accuracy_difference_metrics
from avalanche_amnesia.evaluation.capacity import Capacity, capacity_metrics, network_capacity, trajectory_bytes
from avalanche_amnesia.evaluation.divergence import JSDivergence, jsd, jsd_metrics
from avalanche_amnesia.evaluation.features import features_of
from avalanche_amnesia.evaluation.functional import (
    accuracy,
    cka_distance,
    cosine_distance,
    euclidean_distance,
    js_divergence,
    mask_overlap,
)
from avalanche_amnesia.evaluation.heatmap import mask_heatmap
from avalanche_amnesia.evaluation.probes import Probe, take_probe
from avalanche_amnesia.evaluation.references import References, ReferencesError
from avalanche_amnesia.evaluation.unlearned_accuracy import UnlearnedAccuracy, unlearned_accuracy_metrics

__all__ = [
    "AccuracyDifference",
    "Capacity",
    "JSDivergence",
    "Probe",
    "References",
    "ReferencesError",
    "UnlearnedAccuracy",
    "accuracy",
    "accuracy_difference_metrics",
    "capacity_metrics",
    "cka_distance",
    "cosine_distance",
    "euclidean_distance",
    "features_of",
    "js_divergence",
    "jsd",
    "jsd_metrics",
    "mask_heatmap",
    "mask_overlap",
    "network_capacity",
    "take_probe",
    "trajectory_bytes",
    "unlearned_accuracy_metrics",
]
