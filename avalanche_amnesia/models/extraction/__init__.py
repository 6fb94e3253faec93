"""A task's dense subnet: the plain network that is left when all units outside the task's mask are taken out."""

from avalanche_amnesia.models.extraction.extract import extract

__all__ = ["extract"]
