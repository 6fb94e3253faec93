"""Unlearning of tasks: context, plan, claim and application of an unlearning; compensation, repair and purgers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
