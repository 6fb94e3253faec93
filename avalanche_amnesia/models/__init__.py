"""Backbones, masks over their units or weights, and multi-head models."""

from avalanche_amnesia.models.graph import ModelError, UnitGraph, WeightedLayer
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.mlp import MLP
from avalanche_amnesia.models.multi_head import MultiHeadModel, UnknownTaskError
from avalanche_amnesia.models.subnet import SubnetModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.tracing import trace_backbone

__all__ = [
    "MLP",
    "MaskedModel",
    "ModelError",
    "MultiHeadModel",
    "SubnetModel",
    "TaskMaskedModel",
    "UnitGraph",
    "UnknownTaskError",
    "WeightedLayer",
    "trace_backbone",
]
