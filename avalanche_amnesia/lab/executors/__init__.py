"""Jobs that wait for each other, on processes of this machine, a Ray cluster or Slurm."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
