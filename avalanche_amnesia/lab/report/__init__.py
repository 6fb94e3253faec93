"""Read logged runs and show their results on one page, for readers who do not know the project."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
