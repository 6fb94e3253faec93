"""Weight pools: slots of weights that make unlearning exact."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
