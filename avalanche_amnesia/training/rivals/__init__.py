"""Other people's ways to forget, on the same streams and with the same metrics (METHOD §6b)."""

from avalanche_amnesia.training.rivals.clpu import CLPUDERpp, CLPUPlugin
from avalanche_amnesia.training.rivals.independent import Independent
from avalanche_amnesia.training.rivals.pall import PALL, PALLPlugin

__all__ = ["PALL", "CLPUDERpp", "CLPUPlugin", "Independent", "PALLPlugin"]
