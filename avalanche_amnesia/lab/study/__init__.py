"""Define experiments in settings, run them one by one or as sweeps, and tabulate their results."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
