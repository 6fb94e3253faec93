"""Backbones, masks over their units or weights, and multi-head models."""

from avalanche_amnesia.models.extraction import SubnetReport, extract, subnet_report
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.masked_backbone import trace_backbone
from avalanche_amnesia.models.mlp import MLP
from avalanche_amnesia.models.multi_head import MultiHeadModel, UnknownTaskError
from avalanche_amnesia.models.networks import NetworkPerTask, SideNetworks
from avalanche_amnesia.models.subnet import SubnetModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.validation import fix, validate
from avalanche_amnesia.unit_graph.findings import Finding, ModelError
from avalanche_amnesia.unit_graph.graph import UnitGraph, WeightedLayer

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
