"""Experiments: settings, one run of a method under a request scenario, sweeps of many, and tables of their results."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
