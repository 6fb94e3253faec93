"""Rules that trace masked units through operations: the units a result depends on. One file per kind of operation."""

from avalanche_amnesia.unit_graph.rules import derived, elementwise, mixing, owned, shapes, weighted

__all__ = ["derived", "elementwise", "mixing", "owned", "shapes", "weighted"]
