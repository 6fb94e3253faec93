"""Loggers that write the metrics and unlearnings of a run, for example to Weights & Biases."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
