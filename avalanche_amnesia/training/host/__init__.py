"""Avalanche's side: its plugins, evaluator, loaders and arguments."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
