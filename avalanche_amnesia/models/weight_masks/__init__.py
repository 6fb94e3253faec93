"""Masks over weights (WSN): a winning subnetwork per task."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
