"""Metrics of unlearning, which compare the model with reference models retrained without the unlearned tasks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
