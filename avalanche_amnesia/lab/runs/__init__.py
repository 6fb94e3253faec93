"""Run and measure a stream with requests, and store the states of runs."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
