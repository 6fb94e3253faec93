"""Baselines: other unlearning methods, usable with the same streams and metrics."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
