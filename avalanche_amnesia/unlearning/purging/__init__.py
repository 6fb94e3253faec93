"""Purgers: functions that remove unlearned tasks from the state of Avalanche's plugins and strategies."""

from avalanche_amnesia.unlearning.purging import samples, weights  # noqa: F401 - they register those of Avalanche's own
from avalanche_amnesia.unlearning.purging.purgers import (
    UnknownStateError,
    learned_state,
    own_attributes,
    purger_of,
    register_purger,
)

__all__ = ["UnknownStateError", "learned_state", "own_attributes", "purger_of", "register_purger"]
