"""Metrics of forgetting on request, against retrained references."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
