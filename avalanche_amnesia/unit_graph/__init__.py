"""The units behind every entry of every value of a backbone, read off torch.export with a rule per operation."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
