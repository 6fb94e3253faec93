"""Define experiments in settings, run them one by one or as sweeps, and tabulate their results."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
