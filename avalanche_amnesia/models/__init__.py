"""Backbones, masks over their units, and multi-head models."""

from avalanche_amnesia.models.findings import Finding
from avalanche_amnesia.models.graph import ModelError, UnitGraph, WeightedLayer
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.mlp import MLP
from avalanche_amnesia.models.multi_head import MultiHeadModel, UnknownTaskError
from avalanche_amnesia.models.tracing import trace_backbone
from avalanche_amnesia.models.validation import fix, validate

__all__ = [
    "MLP",
    "Finding",
    "MaskedModel",
    "ModelError",
    "MultiHeadModel",
    "UnitGraph",
    "UnknownTaskError",
    "WeightedLayer",
    "fix",
    "trace_backbone",
    "validate",
]
