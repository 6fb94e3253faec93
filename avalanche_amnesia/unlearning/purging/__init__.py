"""Cleaning what hosts keep: a purger per plugin, or strategy with a memory of its own."""

from avalanche_amnesia.unlearning.purging import samples, weights
from avalanche_amnesia.unlearning.purging.purgers import (
    UnknownStateError,
    learned_state,
    own_attributes,
    purger_of,
    register_purger,
)

BUILT_IN = (samples, weights)
"""The modules whose import registers the purgers of Avalanche's own plugins and strategies."""

__all__ = ["BUILT_IN", "UnknownStateError", "learned_state", "own_attributes", "purger_of", "register_purger"]
