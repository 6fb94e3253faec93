"""Records of what each unlearning changed and of what it guarantees, and their signatures."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
