"""Strategies and plugins: HAT, AdaHAT, AmnesiacHAT, WSN, trajectories and unlearning for any Avalanche strategy."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
