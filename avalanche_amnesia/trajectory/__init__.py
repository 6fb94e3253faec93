"""Trajectory of a training: undo logs of all tasks, and removal of tasks by replay."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
