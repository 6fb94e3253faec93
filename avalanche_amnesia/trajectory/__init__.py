"""Trajectories of training: undo logs of each task, replay without some tasks, files."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
