"""Trajectory: logs of each task's parameter changes, to remove a task by undoing them and replaying later tasks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
