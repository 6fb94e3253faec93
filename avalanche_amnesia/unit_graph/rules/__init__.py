"""Rules for the effect of operations on masked units; one file per family of operations."""

from avalanche_amnesia.unit_graph.rules import derived, elementwise, mixing, owned, shapes, weighted

__all__ = ["derived", "elementwise", "mixing", "owned", "shapes", "weighted"]
