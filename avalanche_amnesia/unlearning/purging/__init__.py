"""Cleaning what hosts keep: an adapter per plugin, or strategy with a memory of its own."""

from avalanche_amnesia.unlearning.purging import (
    best_state,
    gradients,
    importances,
    packnet,
    replay,
    teachers,
)
from avalanche_amnesia.unlearning.purging.learned_state import (
    UnknownStateError,
    learned_state,
    own_attributes,
)
from avalanche_amnesia.unlearning.purging.registry import (
    PurgeContext,
    SavedState,
    StateAdapter,
    adapter_of,
    keeps_own_state,
    register_adapter,
    register_purger,
)

BUILT_IN = (best_state, gradients, importances, packnet, replay, teachers)
"""The modules whose import registers the adapters of Avalanche's own plugins and strategies."""

__all__ = [
    "BUILT_IN",
    "PurgeContext",
    "SavedState",
    "StateAdapter",
    "UnknownStateError",
    "adapter_of",
    "keeps_own_state",
    "learned_state",
    "own_attributes",
    "register_adapter",
    "register_purger",
]
