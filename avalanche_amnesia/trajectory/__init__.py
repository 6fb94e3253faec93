"""Trajectory of a training: undo logs of all tasks, removal of tasks by replay, and log files."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
