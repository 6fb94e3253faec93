"""Plugins that keep samples, to keep gradients from hurting them: GEM and A-GEM."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.benchmarks.utils.data_loader import GroupBalancedInfiniteDataLoader
from avalanche.training.plugins import AGEMPlugin, GEMPlugin
from torch import nn

from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.buffers import subset_alone
from avalanche_amnesia.unlearning.purging.purgers import register_purger

_MEMORY = ("memory_x", "memory_y", "memory_tid")


def _n_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _use_head_of(plugin: Any, task: int) -> None:
    """Let empty memories go through the head of the task in training, which exists for certain."""
    for counter, samples in plugin.memory_x.items():
        if len(samples) == 0:
            plugin.memory_tid[counter] = task


@register_purger(GEMPlugin, before_training=_use_head_of)
def purge_gem(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Empty the memories of the tasks; the gradients at hand, in which they had a part, are dropped.

    The host reads a memory for every experience up to now. One that is empty has no samples, hence no gradient, and no
    constraint.
    """
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
        _use_head_of(plugin, context.in_training)
    return "GEM: the tasks' samples dropped"


@register_purger(AGEMPlugin)
def purge_agem(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Drop the tasks' samples, and the reference gradient, in which they had a part."""
    change.keep(plugin, "buffers", "buffer_dataloader", "buffer_dliter", "reference_gradients")
    options = {} if plugin.buffer_dataloader is None else dict(plugin.buffer_dataloader.loader_kwargs)
    before = sum(map(len, plugin.buffers))
    kept = [
        (buffer, [i for i, task in enumerate(buffer.targets_task_labels) if int(task) not in context.tasks])
        for buffer in plugin.buffers
    ]
    plugin.buffers = [subset_alone(buffer, rows) for buffer, rows in kept if rows]
    plugin.reference_gradients = torch.zeros(_n_weights(context.model), device=next(context.model.parameters()).device)
    plugin.buffer_dataloader, plugin.buffer_dliter = None, iter([])
    if plugin.buffers:
        plugin.buffer_dataloader = GroupBalancedInfiniteDataLoader(
            plugin.buffers, batch_size=plugin.sample_size // len(plugin.buffers), **options
        )
        plugin.buffer_dliter = iter(plugin.buffer_dataloader)
    return f"A-GEM: {before - sum(map(len, plugin.buffers))} samples of the tasks dropped"
