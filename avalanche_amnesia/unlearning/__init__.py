"""Unlearning of tasks: its context, plan, claim and application; compensation, repair and purgers of plugins."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
