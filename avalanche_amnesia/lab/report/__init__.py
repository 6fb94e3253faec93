"""Read logged runs and show their results on one page, for readers who do not know the project."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
