"""Beside the core: baselines, dense subnets, further metrics, streams, and forms of the method that some need."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
