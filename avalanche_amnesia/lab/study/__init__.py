"""Experiments: settings, one run of a method under a request scenario, sweeps of many, and tables of their results."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
