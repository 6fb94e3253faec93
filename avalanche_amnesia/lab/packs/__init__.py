"""Packs: states, references, records and logs of a study's runs in one file, for others to unlearn and audit with."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
