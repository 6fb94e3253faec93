"""Log runs as JSON lines, and send them to W&B later."""

from avalanche_amnesia.faces import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
