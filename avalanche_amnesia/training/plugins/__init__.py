"""Avalanche plugins: masks, trajectories, unlearning, compensation and seeding."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
