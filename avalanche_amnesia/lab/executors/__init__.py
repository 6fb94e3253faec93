"""Jobs that wait for each other, on processes of this machine, a Ray cluster or Slurm."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
