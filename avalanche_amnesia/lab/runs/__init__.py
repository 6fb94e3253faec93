"""Runs: the main job, the store of states, and the command line."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
