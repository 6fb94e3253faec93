"""Other people's ways to forget, on the same streams and with the same metrics (METHOD §6b)."""

from avalanche_amnesia.training.rivals.independent import Independent

__all__ = ["Independent"]
