"""The unit graph: the units that each entry of each value in a backbone depends on, read from torch.export."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
