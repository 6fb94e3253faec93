"""Saved states of strategies: values as JSON and tensors, in files whose loading runs no code."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
