"""Streams over image data sets, networks for them, and schedules (scenarios) of requests to unlearn."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
