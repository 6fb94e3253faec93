"""Runs as JSON lines, sent to W&B later, and figures of whole runs."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
