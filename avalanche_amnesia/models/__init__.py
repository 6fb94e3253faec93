"""Backbones, masks over their units or weights, and multi-head models."""

from avalanche_amnesia.models.extraction import SubnetReport, extract, subnet_report
from avalanche_amnesia.models.findings import Finding
from avalanche_amnesia.models.graph import ModelError, UnitGraph, WeightedLayer
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.mlp import MLP
from avalanche_amnesia.models.multi_head import MultiHeadModel, UnknownTaskError
from avalanche_amnesia.models.networks import NetworkPerTask, SideNetworks
from avalanche_amnesia.models.subnet import SubnetModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.tracing import trace_backbone
from avalanche_amnesia.models.validation import fix, validate

__all__ = [
    "MLP",
    "Finding",
    "MaskedModel",
    "ModelError",
    "MultiHeadModel",
    "NetworkPerTask",
    "SideNetworks",
    "SubnetModel",
    "SubnetReport",
    "TaskMaskedModel",
    "UnitGraph",
    "UnknownTaskError",
    "WeightedLayer",
    "extract",
    "fix",
    "subnet_report",
    "trace_backbone",
    "validate",
]
