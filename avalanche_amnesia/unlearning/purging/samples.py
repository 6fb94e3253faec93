"""Purgers, which remove tasks from stored samples: of replay (also DER, DER++, ER-ACE, ER-AML), GEM and A-GEM."""

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from avalanche.benchmarks.utils.data_loader import GroupBalancedInfiniteDataLoader
from avalanche.benchmarks.utils.flat_data import FlatData
from avalanche.models import avalanche_forward
from avalanche.training import DER, ER_ACE, ER_AML
from avalanche.training.plugins import AGEMPlugin, GEMPlugin, ReplayPlugin
from avalanche.training.utils import cycle
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.backbones import evaluation_mode
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.purgers import register_purger

_COUNTS = ("max_size", "_num_exps", "seen_classes", "seen_groups")


def copy_subset(data: AvalancheDataset, kept: Sequence[int]) -> AvalancheDataset:
    """Return a data set with only the samples at the positions ``kept``, and no hidden reference to other samples."""
    # Avalanche's ``subset`` only hides the remaining samples, labels and logits. Underlying data sets of unknown
    # classes are kept whole.
    result = data.subset(list(kept))
    result._flat_data = _copy_flat_data(result._flat_data, range(len(result)))
    for attribute in list(result._data_attributes.values()):
        set_attribute(result, attribute, list(attribute))
    return result


def set_attribute(data: AvalancheDataset, attribute: Any, values: list[Any]) -> None:
    """Replace the values of one data attribute (e.g. ``logits``) of an Avalanche data set, in place."""
    new = DataAttribute(flat_data(values), attribute.name, use_in_getitem=attribute.use_in_getitem)
    data._data_attributes[attribute.name] = new
    if attribute.name in data.__dict__:
        data.__dict__[attribute.name] = new


def flat_data(values: list[Any]) -> FlatData[Any]:
    """Return values as Avalanche FlatData of two parts, because FlatData of one part can't append repeated values."""
    return FlatData([values[:1], values[1:] or values[:1]], indices=list(range(len(values))))


def _copy_flat_data(flat: Any, kept: Sequence[int]) -> Any:
    places = [flat._get_idx(i) for i in kept]
    datasets, offsets, position = [], {}, 0
    for number in sorted({number for number, _ in places}):
        inner = sorted({i for of, i in places if of == number})
        dataset = flat._datasets[number]
        if isinstance(dataset, FlatData):
            dataset = _copy_flat_data(dataset, inner)
        else:
            dataset, inner = _copy_part(dataset, inner)
        offsets[number] = {old: position + new for new, old in enumerate(inner)}
        position += len(inner)
        datasets.append(dataset)
    result = copy(flat)
    result._datasets = datasets
    result._indices = [offsets[number][i] for number, i in places]
    result._cumulative_sizes = ConcatDataset.cumsum(datasets)
    return result


def _copy_part(dataset: Any, kept: list[int]) -> tuple[Any, list[int]]:
    """Return (data set with only the samples ``kept``, their old positions). Data sets of unknown class stay whole."""
    if isinstance(dataset, list):
        return [dataset[i] for i in kept], kept
    if hasattr(dataset, "copy_subset"):  # a task in this package's streams shares its base with the whole stream
        return dataset.copy_subset(kept), kept
    if type(dataset) is TensorDataset:
        return TensorDataset(*(tensor[kept] for tensor in dataset.tensors)), kept
    return dataset, list(range(len(dataset)))


def purge_policy(policy: Any, tasks: Collection[int], change: Transaction) -> int:
    """Remove the samples of ``tasks`` from a storage policy (replay buffer); return the number of removed samples."""
    groups = getattr(policy, "buffer_groups", None)
    if groups is None:
        return _purge_buffer(policy, tasks, change)
    change.keep(policy, *(name for name in ("buffer_groups", *_COUNTS) if name in vars(policy)))
    removed = sum(purge_policy(group, tasks, change) for group in groups.values())
    left = {key: group for key, group in groups.items() if len(group.buffer)}
    if hasattr(policy, "_num_exps"):  # its keys count experiences: renumber them to free the removed ones' space
        left = dict(enumerate(left.values()))
        policy._num_exps = len(left)
    for seen in ("seen_classes", "seen_groups"):
        if hasattr(policy, seen):
            setattr(policy, seen, getattr(policy, seen) & set(left))
    policy.buffer_groups = left
    return removed


def _purge_buffer(policy: Any, tasks: Collection[int], change: Transaction) -> int:
    buffer = policy.buffer
    if len(buffer) == 0:
        return 0
    kept = [i for i, task in enumerate(buffer.targets_task_labels) if int(task) not in tasks]
    # Also if no sample is removed, because the underlying data set may contain samples of every task.
    change.set(policy, buffer=copy_subset(buffer, kept))
    weights = getattr(policy, "_buffer_weights", None)
    if weights is not None:
        change.set(policy, _buffer_weights=weights[kept].clone())
    return len(buffer) - len(kept)


def single_buffers(policy: Any) -> list[Any]:
    """Return the ungrouped buffers of a storage policy: the policy itself, or the buffers of its groups."""
    groups = getattr(policy, "buffer_groups", None)
    return [policy] if groups is None else [single for group in groups.values() for single in single_buffers(group)]


@register_purger(ReplayPlugin)
def purge_replay(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Remove the unlearned tasks' samples from the storage policy (replay buffer) of a ReplayPlugin."""
    return f"Replay: {purge_policy(plugin.storage_policy, set(context.tasks), change)} samples of the tasks dropped"


@register_purger(DER, ER_ACE, ER_AML)
def purge_own_buffer(strategy: Any, context: UnlearningContext, change: Transaction) -> str:
    """Remove unlearned tasks' samples from a strategy's replay buffer; recompute logits that depend on the tasks."""
    removed = purge_policy(strategy.storage_policy, set(context.tasks), change)
    renewed = sum(_renew_logits(single, context, change) for single in single_buffers(strategy.storage_policy))
    _reset_loaders(strategy, context, change)
    line = f"{type(strategy).__name__}: {removed} samples of the tasks dropped"
    return f"{line}, {renewed} samples' logits replaced by the model's without the tasks" if renewed else line


def _reset_loaders(strategy: Any, context: UnlearningContext, change: Transaction) -> None:
    """Clear a strategy's last replay batch and loaders. In a training, create new loaders if enough samples remain."""
    last = [name for name in vars(strategy) if name == "batch_logits" or name.startswith("mb_buffer_")]
    loaders = [name for name in ("replay_loader", "pos_neg_loaders") if getattr(strategy, name, None)]
    change.set(strategy, **dict.fromkeys((*last, *loaders)))
    if not loaders or context.in_training is None:
        return
    policy, size = strategy.storage_policy, strategy.batch_size_mem
    if len(policy.buffer) >= size:
        strategy.replay_loader = _endless_loader(policy.buffer, size)
        if "pos_neg_loaders" in loaders:
            groups = single_buffers(policy)
            strategy.pos_neg_loaders = [_endless_loader(group.buffer, strategy.train_mb_size) for group in groups]


def _endless_loader(data: Any, batch_size: int) -> Iterator[Any]:
    # Like Avalanche's loader, but also returns partial batches, because a small buffer would loop forever.
    return cycle(DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=len(data) >= batch_size))


def _renew_logits(buffer: Any, context: UnlearningContext, change: Transaction) -> int:
    """Recompute a buffer's logits that were computed after the training of an unlearned task; return their number."""
    attribute = buffer.buffer._data_attributes.get("logits") if len(buffer.buffer) else None
    if attribute is None:
        return 0
    tasks = [int(task) for task in buffer.buffer.targets_task_labels]
    later = context.order[min(map(context.order.index, context.tasks)) + 1 :]
    stale = [i for i, task in enumerate(tasks) if task in later or task not in context.order]
    if not stale:
        return 0
    logits: list[Tensor] = [attribute[i] for i in range(len(tasks))]
    items = buffer.buffer.eval()
    x = torch.stack([items[i][0] for i in stale])
    labels = torch.tensor([tasks[i] for i in stale])
    device = next(context.model.parameters()).device
    with evaluation_mode(context.model):
        fresh = avalanche_forward(context.model, x.to(device), labels.to(device)).cpu()
    for i, row in zip(stale, fresh, strict=True):
        logits[i] = row.clone()
    change.set(buffer, buffer=copy_subset(buffer.buffer, range(len(tasks))))
    set_attribute(buffer.buffer, attribute, logits)
    return len(stale)


_MEMORY = ("memory_x", "memory_y", "memory_tid")


def _n_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _relabel_empty_memories(plugin: Any, task: int) -> None:
    """Give empty GEM memories the label of the task in training, because GEM runs the head of each memory's task."""
    for counter, samples in plugin.memory_x.items():
        if len(samples) == 0:
            plugin.memory_tid[counter] = task


@register_purger(GEMPlugin, before_training=_relabel_empty_memories)
def purge_gem(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Empty GEM's memories of the unlearned tasks, and remove GEM's gradients, which depend on these memories."""
    # Avalanche needs a memory for every earlier experience; an empty one adds no gradient and no constraint.
    change.keep(plugin, *_MEMORY, "G")
    memory_x, memory_y, memory_tid = (dict(getattr(plugin, part)) for part in _MEMORY)
    for task in context.tasks:
        counter = context.counters[task]
        if counter in memory_x:
            memory_x[counter], memory_y[counter] = memory_x[counter][:0].clone(), memory_y[counter][:0].clone()
            memory_tid[counter] = context.in_training
    plugin.memory_x, plugin.memory_y, plugin.memory_tid = memory_x, memory_y, memory_tid
    plugin.G = torch.empty(0, _n_weights(context.model))  # no constraint in the current iteration
    if context.in_training is not None:
        _relabel_empty_memories(plugin, context.in_training)
    return "GEM: the tasks' samples dropped"


@register_purger(AGEMPlugin)
def purge_agem(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Remove the unlearned tasks' samples from A-GEM, and zero the reference gradient, which depends on the samples."""
    change.keep(plugin, "buffers", "buffer_dataloader", "buffer_dliter", "reference_gradients")
    options = {} if plugin.buffer_dataloader is None else dict(plugin.buffer_dataloader.loader_kwargs)
    before = sum(map(len, plugin.buffers))
    kept = [
        (buffer, [i for i, task in enumerate(buffer.targets_task_labels) if int(task) not in context.tasks])
        for buffer in plugin.buffers
    ]
    plugin.buffers = [copy_subset(buffer, rows) for buffer, rows in kept if rows]
    plugin.reference_gradients = torch.zeros(_n_weights(context.model), device=next(context.model.parameters()).device)
    plugin.buffer_dataloader, plugin.buffer_dliter = None, iter([])
    if plugin.buffers:
        plugin.buffer_dataloader = GroupBalancedInfiniteDataLoader(
            plugin.buffers, batch_size=plugin.sample_size // len(plugin.buffers), **options
        )
        plugin.buffer_dliter = iter(plugin.buffer_dataloader)
    return f"A-GEM: {before - sum(map(len, plugin.buffers))} samples of the tasks dropped"
