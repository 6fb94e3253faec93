"""Records of unlearning, and the search for what is left of tasks in objects and files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
