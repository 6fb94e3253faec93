"""The units behind every entry of every value of a backbone, read off torch.export with a rule per operation."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
