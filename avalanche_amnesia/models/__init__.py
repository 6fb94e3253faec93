"""Multi-head models: plain ones, and models with a mask over units or weights, or separate weights, per task."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
