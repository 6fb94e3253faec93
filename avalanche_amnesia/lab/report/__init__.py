"""Report: results of runs as one page, for people who never saw the project."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
