"""Unlearning of tasks: its plan, guarantee and execution; repair of other tasks; cleaning of plugins (purgers)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
