"""Rules of what operations do to masked units; one file per family."""

from avalanche_amnesia.unit_graph.rules import (
    arithmetic,
    declared,
    derived,
    elementwise,
    mixing,
    norms,
    pooling,
    shapes,
    weighted,
)

__all__ = [
    "arithmetic",
    "declared",
    "derived",
    "elementwise",
    "mixing",
    "norms",
    "pooling",
    "shapes",
    "weighted",
]
