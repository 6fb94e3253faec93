"""Plugins that hold weights where they are: at anchors, by importance (EWC, SI, MAS), or by owner (PackNet)."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from typing import Any

import torch
from avalanche.models.packnet import PackNetModule, PackNetPlugin, WeightAndBiasPackNetModule
from avalanche.training.plugins import EWCPlugin, MASPlugin, SynapticIntelligencePlugin
from avalanche.training.utils import ParamData
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.purgers import register_purger

Store = dict[str, Any]  # name → the host's ParamData


def _only(store: Store, names: Collection[str]) -> Store:
    return {name: kept for name, kept in store.items() if name in names}


def _lasting(model: nn.Module) -> set[str]:
    """Names of the parameters that outlive a training: a mask in the making (``embedding``) is the task's own."""
    names = {name for name, _ in model.named_parameters()}
    if not isinstance(model, MultiHeadModel):
        return names
    prefixes = ("backbone.", *(f"{container}." for container in model.task_containers))
    return {name for name in names if name.startswith(prefixes)}


def _filled(store: Store, value: float) -> Store:
    return {
        name: ParamData(name, kept.shape, init_tensor=torch.full_like(kept.data, value), device=kept.device)
        for name, kept in store.items()
    }


def _at_last_commit(store: Store, context: UnlearningContext) -> Store:
    """An anchor that was the state after the last training, as that state is now."""
    new = dict(context.removal.values) | dict(context.removal.before)
    result = {}
    for name, kept in store.items():
        value = new[name].reshape(kept.shape).to(kept.device).clone() if name in new else kept.data
        result[name] = ParamData(name, kept.shape, init_tensor=value, device=kept.device)
    return result


@register_purger(EWCPlugin)
def purge_ewc(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Drop the tasks' anchors and importances, and take their updates out of later anchors."""
    change.set(plugin, saved_params=deepcopy(plugin.saved_params), importances=deepcopy(plugin.importances))
    if plugin.mode == "online":  # its one running sum of importances can't be taken apart
        plugin.saved_params.clear()
        plugin.importances.clear()
        return "EWC (online): the anchor and the summed importances, which mix all tasks, were dropped"
    of_counter = {counter: task for task, counter in context.counters.items()}
    for store in (plugin.saved_params, plugin.importances):
        for counter in list(store):
            if of_counter.get(counter) in context.tasks:
                del store[counter]
                continue
            for name in context.own_parameters & set(store[counter]):
                del store[counter][name]
    for counter, anchor in plugin.saved_params.items():
        for name, update in _updates_before(context, of_counter.get(counter)).items():
            if name in anchor:
                kept = anchor[name].data
                anchor[name].data = (kept.double() - update.to(kept.device)).to(kept.dtype)
    return "EWC: the tasks' anchors and importances dropped, their updates taken out of later anchors"


def _updates_before(context: UnlearningContext, task: int | None) -> dict[str, Tensor]:
    """Sum of the updates, among those of tasks and repairs that go, that a state saved after ``task`` holds."""
    held = context.writers[: context.writers.index(task)] if task in context.writers else context.writers
    total: dict[str, Tensor] = {}
    for gone in set(held) & set(context.removal.updates):
        for name, update in context.removal.updates[gone].items():
            total[name] = total[name] + update if name in total else update
    return total


@register_purger(MASPlugin)
def purge_mas(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Put the one anchor to the new state and the importances, which mix all tasks, to zero."""
    if plugin.params is None:
        return "MAS: no anchor yet"
    change.keep(plugin, "params", "importance")
    names = _lasting(context.model)
    plugin.params = _at_last_commit(_only(plugin.params, names), context)
    # The host insists on importances once a task was trained: zeros, which hold nothing.
    plugin.importance = _filled(_only(plugin.importance, names), 0.0)
    return "MAS: the anchor is the state without the tasks; the importances, which mix all tasks, were dropped"


@register_purger(SynapticIntelligencePlugin)
def purge_si(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Put the anchor to the new state, and the sums over all tasks to zero, but for a training that is under way."""
    change.keep(plugin, "ewc_data", "syn_data")
    names = _lasting(context.model)
    if context.in_training is not None:
        names |= {name for name, _ in context.model.named_parameters()}
    anchor, importance = (_only(store, names) for store in plugin.ewc_data)
    plugin.ewc_data = (_at_last_commit(anchor, context), _filled(importance, 0.0))
    kept = {part: _only(store, names) for part, store in plugin.syn_data.items()}
    # The path integral of the task in training is its own; everything else mixes tasks or repeats old weights.
    plugin.syn_data = {
        part: store if part == "trajectory" and context.in_training is not None else _filled(store, 0.0)
        for part, store in kept.items()
    }
    return "SI: the anchor is the state without the tasks; the importances, which mix all tasks, were dropped"


@register_purger(PackNetPlugin)
def purge_packnet(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Give the tasks' weights, whose owners are noted in the model, to the next training; their values are back.

    A task that was unlearned can't be learned again under its old label: PackNet takes a label below its own count of
    tasks for one that it knows.
    """
    freed = 0
    for module in context.model.modules():
        if not isinstance(module, WeightAndBiasPackNetModule):
            continue
        change.keep(module, "task_index", "visible_mask", "unfrozen_mask")
        owners = module.task_index.clone()
        theirs = torch.isin(owners, torch.tensor([context.counters[t] for t in context.tasks], device=owners.device))
        pruned = module.state == PackNetModule.State.POST_PRUNE  # this training has taken its share already
        owners[theirs] = int(module.PRUNED_CODE) if pruned else module.task_count
        module.task_index = owners
        module.visible_mask = owners <= module.active_task
        learns = module.active_task == module.task_count and module.state != PackNetModule.State.EVAL
        module.unfrozen_mask = (owners == module.active_task) & learns
        freed += int(theirs.sum())
    return f"PackNet: {freed} weights of the tasks are free again"
