"""Weight pools: each task trains only the weights in its slot, so that it can be unlearned exactly."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
