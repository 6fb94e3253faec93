"""Multi-head models: plain ones, and models with a mask over units or weights, or separate weights, per task."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
