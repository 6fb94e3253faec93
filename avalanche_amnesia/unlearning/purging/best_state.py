"""Early stopping, which keeps a copy of the best weights."""

from __future__ import annotations

from typing import Any

from avalanche.training.plugins import EarlyStoppingPlugin
from torch import nn

from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.purging.registry import PurgeContext, SavedState, StateAdapter, register_adapter


@register_adapter(EarlyStoppingPlugin)
class EarlyStoppingAdapter(StateAdapter):
    """The best weights of one training: between trainings there is nothing worth keeping."""

    def save(self, plugin: Any) -> SavedState:
        """Nothing: every training starts anew."""
        return SavedState()

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Start anew."""
        plugin.best_state = plugin.best_val = plugin.best_step = None

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Drop the copy; in the middle of a training the search for the best weights begins again."""
        change.keep(plugin, "best_state", "best_val", "best_step")
        self.load(plugin, SavedState(), context.model)
        return "EarlyStopping: its copy of the best weights was dropped"
