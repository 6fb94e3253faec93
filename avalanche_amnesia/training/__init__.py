"""Strategies and plugins: HAT, AdaHAT, AmnesiacHAT, WSN, trajectories and unlearning for any Avalanche strategy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
