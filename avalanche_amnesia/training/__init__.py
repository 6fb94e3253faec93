"""Strategies (HAT, AdaHAT, AmnesiacHAT, WSN) and plugins that record updates and unlearn tasks in any strategy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
