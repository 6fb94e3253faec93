"""Train on a stream with unlearning requests, measure the run, and store strategy states for other runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
