"""Plugins that keep samples, to keep gradients from hurting them: GEM and A-GEM."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.benchmarks.utils.data_loader import GroupBalancedInfiniteDataLoader
from avalanche.training.plugins import AGEMPlugin, GEMPlugin
from torch import Tensor, nn

from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.purging.buffers import load_samples, save_samples, subset_alone
from avalanche_amnesia.unlearning.purging.registry import PurgeContext, SavedState, StateAdapter, register_adapter

_MEMORY = ("memory_x", "memory_y", "memory_tid")


def _n_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@register_adapter(GEMPlugin)
class GEMAdapter(StateAdapter):
    """Samples per experience.

    The host reads a memory for every experience up to now. That of a task that goes becomes empty: no samples, hence no
    gradient, and no constraint.
    """

    def save(self, plugin: Any) -> SavedState:
        """Samples, labels and tasks, by experience."""
        tensors = {
            f"{part}/{counter}": value.clone()
            for part in _MEMORY
            for counter, value in getattr(plugin, part).items()
            if isinstance(value, Tensor)  # an empty memory has no task
        }
        return SavedState(tensors, {"counters": list(plugin.memory_x)})

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Fill the memory."""
        for part in _MEMORY:
            names = {counter: f"{part}/{counter}" for counter in state.data["counters"]}
            setattr(plugin, part, {c: state.tensors[n].clone() for c, n in names.items() if n in state.tensors})

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Empty the memories of the tasks; the gradients at hand, in which they had a part, are dropped."""
        change.keep(plugin, *_MEMORY, "G")
        memory_x, memory_y, memory_tid = (dict(getattr(plugin, part)) for part in _MEMORY)
        for task in context.tasks:
            counter = context.counters[task]
            if counter in memory_x:
                memory_x[counter], memory_y[counter] = memory_x[counter][:0].clone(), memory_y[counter][:0].clone()
                memory_tid[counter] = context.in_training
        plugin.memory_x, plugin.memory_y, plugin.memory_tid = memory_x, memory_y, memory_tid
        plugin.G = torch.empty(0, _n_weights(context.model))  # in the middle of an iteration: no constraint at all
        if context.in_training is not None:
            self.before_training(plugin, context.in_training)
        return "GEM: the tasks' samples dropped"

    def before_training(self, plugin: Any, task: int) -> None:
        """Let an empty memory go through the head of the task in training, which exists for certain."""
        for counter, samples in plugin.memory_x.items():
            if len(samples) == 0:
                plugin.memory_tid[counter] = task


@register_adapter(AGEMPlugin)
class AGEMAdapter(StateAdapter):
    """One data set of samples per experience, and an endless loader over all of them."""

    def save(self, plugin: Any) -> SavedState:
        """The samples of every data set."""
        tensors: dict[str, Tensor] = {}
        for number, buffer in enumerate(plugin.buffers):
            tensors |= save_samples(buffer, f"buffer/{number}")
        return SavedState(tensors, {"n_buffers": len(plugin.buffers)})

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Fill the data sets."""
        plugin.buffers = [load_samples(state.tensors, f"buffer/{n}") for n in range(state.data["n_buffers"])]
        self._reload(plugin, {})

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Drop the tasks' samples, and the reference gradient, in which they had a part."""
        names = ("buffers", "buffer_dataloader", "buffer_dliter", "reference_gradients")
        change.keep(plugin, *names)
        options = {} if plugin.buffer_dataloader is None else dict(plugin.buffer_dataloader.loader_kwargs)
        before = sum(map(len, plugin.buffers))
        kept = [
            (buffer, [i for i, task in enumerate(buffer.targets_task_labels) if int(task) not in context.tasks])
            for buffer in plugin.buffers
        ]
        plugin.buffers = [subset_alone(buffer, rows) for buffer, rows in kept if rows]
        plugin.reference_gradients = torch.zeros(
            _n_weights(context.model), device=next(context.model.parameters()).device
        )
        self._reload(plugin, options)
        return f"A-GEM: {before - sum(map(len, plugin.buffers))} samples of the tasks dropped"

    def _reload(self, plugin: Any, options: dict[str, Any]) -> None:
        plugin.buffer_dataloader, plugin.buffer_dliter = None, iter([])
        if plugin.buffers:
            plugin.buffer_dataloader = GroupBalancedInfiniteDataLoader(
                plugin.buffers, batch_size=plugin.sample_size // len(plugin.buffers), **options
            )
            plugin.buffer_dliter = iter(plugin.buffer_dataloader)
