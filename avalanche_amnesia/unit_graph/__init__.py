"""The unit graph: the units that each entry of each value in a backbone depends on, read from torch.export."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
