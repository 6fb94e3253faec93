"""Trajectory: undo logs of all tasks' parameter changes, and removal of tasks by replay of the remaining ones."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
