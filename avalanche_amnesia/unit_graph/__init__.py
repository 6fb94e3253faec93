"""The units behind every entry of every value of a backbone, read off torch.export with a rule per operation."""

from avalanche_amnesia.unit_graph.findings import Finding, ModelError, Refused
from avalanche_amnesia.unit_graph.registry import derives, rule
from avalanche_amnesia.unit_graph.values import Constant, Masked, ParameterValue, Value, always_in_use

__all__ = [
    "Constant",
    "Finding",
    "Masked",
    "ModelError",
    "ParameterValue",
    "Refused",
    "Value",
    "always_in_use",
    "derives",
    "rule",
]
