"""Optional parts: baselines, additional metrics, data streams, shadow copies and repair."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
