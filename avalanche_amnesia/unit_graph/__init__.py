"""Unit graph of a backbone, traced by torch.export: the units (masked layer outputs) that each value depends on."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
