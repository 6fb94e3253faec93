"""Baselines: other unlearning methods, usable with the same streams and metrics."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
