"""Optional metrics: relapse, membership inference, mask overlap, unit owners, cost, and statistics over seeds."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
