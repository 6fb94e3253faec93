"""PackNet, whose model notes for every weight the task that owns it."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.models.packnet import PackNetModule, PackNetPlugin, WeightAndBiasPackNetModule
from torch import nn

from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.purging.registry import PurgeContext, SavedState, StateAdapter, register_adapter


@register_adapter(PackNetPlugin)
class PackNetAdapter(StateAdapter):
    """The owners of the weights, which stand in the model. A task that was unlearned can't be learned again under its
    old label: PackNet takes a label below its own count of tasks for one that it knows."""

    def save(self, plugin: Any) -> SavedState:
        """Nothing: the owners are buffers of the model."""
        return SavedState()

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Nothing: the owners are buffers of the model."""

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Give the tasks' weights, which have their old values again, to the next training."""
        freed = 0
        for module in context.model.modules():
            if not isinstance(module, WeightAndBiasPackNetModule):
                continue
            change.keep(module, "task_index", "visible_mask", "unfrozen_mask")
            owners = module.task_index.clone()
            theirs = torch.isin(
                owners, torch.tensor([context.counters[t] for t in context.tasks], device=owners.device)
            )
            pruned = module.state == PackNetModule.State.POST_PRUNE  # this training has taken its share already
            owners[theirs] = int(module.PRUNED_CODE) if pruned else module.task_count
            module.task_index = owners
            module.visible_mask = owners <= module.active_task
            learns = module.active_task == module.task_count and module.state != PackNetModule.State.EVAL
            module.unfrozen_mask = (owners == module.active_task) & learns
            freed += int(theirs.sum())
        return f"PackNet: {freed} weights of the tasks are free again"
