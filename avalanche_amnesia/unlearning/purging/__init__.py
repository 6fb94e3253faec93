"""Purgers: functions that remove unlearned tasks from the state of Avalanche's plugins and strategies."""

from avalanche_amnesia.unlearning.purging import samples, weights
from avalanche_amnesia.unlearning.purging.purgers import (
    UnknownStateError,
    learned_state,
    own_attributes,
    purger_of,
    register_purger,
)

BUILT_IN = (samples, weights)
"""Modules that register the purgers of Avalanche's own plugins and strategies on import."""

__all__ = ["BUILT_IN", "UnknownStateError", "learned_state", "own_attributes", "purger_of", "register_purger"]
