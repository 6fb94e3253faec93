"""What every layer and operation does to masked units; one file per kind, registered by decorator."""

from avalanche_amnesia.models.rules import (
    arithmetic,
    declared,
    elementwise,
    mixing,
    norms,
    pooling,
    shapes,
    weighted,
)

__all__ = ["arithmetic", "declared", "elementwise", "mixing", "norms", "pooling", "shapes", "weighted"]
