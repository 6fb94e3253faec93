"""Run dependent jobs in local processes, on a Ray cluster or with Slurm."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
