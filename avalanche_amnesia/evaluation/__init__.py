"""Metrics of unlearning on request, which compare the model with retrained reference models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
