"""Unlearning of tasks, as a plan that is applied as a whole: compensations, purging of hosts."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
