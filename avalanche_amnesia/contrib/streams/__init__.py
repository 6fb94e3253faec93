"""Streams over image data sets, networks for them, and request scenarios."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
