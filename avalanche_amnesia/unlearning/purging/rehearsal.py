"""Replay of stored samples: the plugin, and strategies with a buffer of their own (DER, DER++, ER-ACE, ER-AML)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from avalanche.models import avalanche_forward
from avalanche.training import DER, ER_ACE, ER_AML
from avalanche.training.plugins import ReplayPlugin
from avalanche.training.utils import cycle
from torch import Tensor
from torch.utils.data import DataLoader

from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.buffers import (
    purge_policy,
    set_attribute,
    single_buffers,
    subset_alone,
)
from avalanche_amnesia.unlearning.purging.purgers import register_purger


@register_purger(ReplayPlugin)
def purge_replay(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Drop the tasks' samples from a storage policy of whatever kind."""
    removed = purge_policy(plugin.storage_policy, set(context.tasks), change)
    return f"Replay: {removed} samples of the tasks dropped"


@register_purger(DER, ER_ACE, ER_AML)
def purge_own_buffer(strategy: Any, context: UnlearningContext, change: Transaction) -> str:
    """Drop the tasks' samples from a strategy's own buffer; logits given when the tasks were known are given again."""
    removed = purge_policy(strategy.storage_policy, set(context.tasks), change)
    renewed = sum(_renew_logits(single, context, change) for single in single_buffers(strategy.storage_policy))
    _reload(strategy, context, change)
    line = f"{type(strategy).__name__}: {removed} samples of the tasks dropped"
    return f"{line}, {renewed} samples' logits replaced by the model's without the tasks" if renewed else line


def _reload(strategy: Any, context: UnlearningContext, change: Transaction) -> None:
    """Let go of the old samples: last batches, and the loader of a training that is under way."""
    last = [name for name in vars(strategy) if name in _LAST_BATCH or name.startswith("mb_buffer_")]
    loaders = [name for name in ("replay_loader", "pos_neg_loaders") if getattr(strategy, name, None)]
    change.set(strategy, **dict.fromkeys((*last, *loaders)))
    if not loaders or context.in_training is None:
        return
    policy, size = strategy.storage_policy, strategy.batch_size_mem
    if len(policy.buffer) >= size:
        strategy.replay_loader = _endless(policy.buffer, size)
        if "pos_neg_loaders" in loaders:
            groups = single_buffers(policy)
            strategy.pos_neg_loaders = [_endless(group.buffer, strategy.train_mb_size) for group in groups]


def _endless(data: Any, batch_size: int) -> Iterator[Any]:
    # As the host's, but a buffer that holds no whole batch any more must give what it has: it would spin for ever.
    return cycle(DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=len(data) >= batch_size))


_LAST_BATCH = ("batch_logits",)


def _renew_logits(buffer: Any, context: UnlearningContext, change: Transaction) -> int:
    """Give logits anew that were stored when one of the tasks that go had been learned: they hold its update."""
    attribute = buffer.buffer._data_attributes.get("logits") if len(buffer.buffer) else None
    if attribute is None:
        return 0
    tasks = [int(task) for task in buffer.buffer.targets_task_labels]
    stale = [i for i, task in enumerate(tasks) if context.trained_after(task)]
    if not stale:
        return 0
    logits: list[Tensor] = [attribute[i] for i in range(len(tasks))]
    items = buffer.buffer.eval()
    x = torch.stack([items[i][0] for i in stale])
    labels = torch.tensor([tasks[i] for i in stale])
    device = next(context.model.parameters()).device
    with evaluating(context.model):
        fresh = avalanche_forward(context.model, x.to(device), labels.to(device)).cpu()
    for i, row in zip(stale, fresh, strict=True):
        logits[i] = row.clone()
    change.set(buffer, buffer=subset_alone(buffer.buffer, range(len(tasks))))
    set_attribute(buffer.buffer, attribute, logits)
    return len(stale)
