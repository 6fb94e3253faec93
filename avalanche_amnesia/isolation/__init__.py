"""Weight pools: each task trains only its own part of the weights, so that it can be unlearned exactly."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
