"""Purgers, which remove tasks from stored weights: anchors (EWC, SI, MAS), owners (PackNet), models (LwF, LFL)."""

from collections.abc import Collection
from copy import deepcopy
from typing import Any

import torch
from avalanche.models.packnet import PackNetModule, PackNetPlugin, WeightAndBiasPackNetModule
from avalanche.training import plugins as stock
from avalanche.training.utils import ParamData, get_last_fc_layer
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext, remove_task_modules
from avalanche_amnesia.unlearning.purging.purgers import register_purger

Store = dict[str, Any]  # name → Avalanche's ParamData


def _select(store: Store, names: Collection[str]) -> Store:
    return {name: kept for name, kept in store.items() if name in names}


def _lasting_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that outlive a training; HAT's task embedding, for example, is temporary."""
    names = {name for name, _ in model.named_parameters()}
    if not isinstance(model, MultiHeadModel):
        return names
    return {name for name in names if name.startswith(("backbone.", "heads."))}


def _fill_like(store: Store, value: float) -> Store:
    return {
        name: ParamData(name, kept.shape, init_tensor=torch.full_like(kept.data, value), device=kept.device)
        for name, kept in store.items()
    }


def _anchor_without_tasks(store: Store, context: UnlearningContext) -> Store:
    """Return an anchor (a copy of the weights after the last training) without the unlearned tasks' updates."""
    new = dict(context.removal.values) | dict(context.removal.before)
    result = {}
    for name, kept in store.items():
        value = new[name].reshape(kept.shape).to(kept.device).clone() if name in new else kept.data
        result[name] = ParamData(name, kept.shape, init_tensor=value, device=kept.device)
    return result


@register_purger(stock.EWCPlugin)
def purge_ewc(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Remove unlearned tasks' anchors and importances from EWC; subtract the tasks' updates from later anchors."""
    change.set(plugin, saved_params=deepcopy(plugin.saved_params), importances=deepcopy(plugin.importances))
    if plugin.mode == "online":  # a single sum of importances can't be separated by task
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
        for name, update in _removed_updates_in_anchor(context, of_counter.get(counter)).items():
            if name in anchor:
                kept = anchor[name].data
                anchor[name].data = (kept.double() - update.to(kept.device)).to(kept.dtype)
    return "EWC: the tasks' anchors and importances dropped, their updates taken out of later anchors"


def _removed_updates_in_anchor(context: UnlearningContext, task: int | None) -> dict[str, Tensor]:
    """Return parameter name → sum of the removed updates in the weights that EWC saved after training ``task``."""
    held = context.writers[: context.writers.index(task)] if task in context.writers else context.writers
    total: dict[str, Tensor] = {}
    for gone in set(held) & set(context.removal.updates):
        for name, update in context.removal.updates[gone].items():
            total[name] = total[name] + update if name in total else update
    return total


@register_purger(stock.MASPlugin)
def purge_mas(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Set MAS's anchor to the weights without the unlearned tasks, and importances (which mix all tasks) to 0."""
    if plugin.params is None:
        return "MAS: no anchor yet"
    change.keep(plugin, "params", "importance")
    names = _lasting_names(context.model)
    plugin.params = _anchor_without_tasks(_select(plugin.params, names), context)
    # Avalanche needs importances after the first task: zeros contain no information.
    plugin.importance = _fill_like(_select(plugin.importance, names), 0.0)
    return "MAS: the anchor is the state without the tasks; the importances, which mix all tasks, were dropped"


@register_purger(stock.SynapticIntelligencePlugin)
def purge_si(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Set SI's anchor to the weights without the unlearned tasks, and SI's sums to 0, except the current task's."""
    change.keep(plugin, "ewc_data", "syn_data")
    names = _lasting_names(context.model)
    if context.in_training is not None:
        names |= {name for name, _ in context.model.named_parameters()}
    anchor, importance = (_select(store, names) for store in plugin.ewc_data)
    plugin.ewc_data = (_anchor_without_tasks(anchor, context), _fill_like(importance, 0.0))
    kept = {part: _select(store, names) for part, store in plugin.syn_data.items()}
    # The path integral belongs to the task in training only; all other values mix tasks or copy old weights.
    plugin.syn_data = {
        part: store if part == "trajectory" and context.in_training is not None else _fill_like(store, 0.0)
        for part, store in kept.items()
    }
    return "SI: the anchor is the state without the tasks; the importances, which mix all tasks, were dropped"


@register_purger(PackNetPlugin)
def purge_packnet(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Mark the unlearned tasks' weights as free in PackNet's modules, which store the owner of each weight."""
    # An unlearned task can't be trained again under its old label: PackNet assumes that every label below its
    # count of tasks has been trained.
    freed = 0
    for module in context.model.modules():
        if not isinstance(module, WeightAndBiasPackNetModule):
            continue
        change.keep(module, "task_index", "visible_mask", "unfrozen_mask")
        owners = module.task_index.clone()
        theirs = torch.isin(owners, torch.tensor([context.counters[t] for t in context.tasks], device=owners.device))
        pruned = module.state == PackNetModule.State.POST_PRUNE  # this training has already chosen its weights
        owners[theirs] = int(module.PRUNED_CODE) if pruned else module.task_count
        module.task_index = owners
        module.visible_mask = owners <= module.active_task
        learns = module.active_task == module.task_count and module.state != PackNetModule.State.EVAL
        module.unfrozen_mask = (owners == module.active_task) & learns
        freed += int(theirs.sum())
    return f"PackNet: {freed} weights of the tasks are free again"


def teacher_without_tasks(teacher: nn.Module, context: UnlearningContext) -> nn.Module:
    """Return a copy of a teacher (the model saved after the last training) without the unlearned tasks."""
    result = deepcopy(teacher)
    with torch.no_grad(), register_all(result):
        for name, parameter in result.named_parameters():
            new = context.removal.before.get(name, context.removal.values.get(name))
            if new is not None:
                parameter.copy_(new)
    with Transaction() as of_copy:
        for task in context.tasks:
            remove_task_modules(result, task, of_copy)
        of_copy.commit()
    return result


@register_purger(stock.LwFPlugin)
def purge_lwf(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Remove the unlearned tasks' updates and heads from LwF's teacher; delete the teacher if no task remains."""
    method = plugin.lwf
    change.set(method, prev_model=method.prev_model, prev_classes_by_task=deepcopy(method.prev_classes_by_task))
    for task in context.tasks:
        method.prev_classes_by_task.pop(task, None)
    if method.prev_model is None:
        return "LwF: no teacher yet"
    teacher = teacher_without_tasks(method.prev_model, context)
    method.prev_model = teacher if method.prev_classes_by_task else None
    return "LwF: the tasks' updates and heads taken out of the teacher"


@register_purger(stock.LFLPlugin)
def purge_lfl(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Remove the unlearned tasks from LFL's teacher; if no task is left, delete it, and unfreeze the last layer."""
    if plugin.prev_model is None:
        return "LFL: no teacher yet"
    change.keep(plugin, "prev_model")
    if set(context.order) <= set(context.tasks):
        plugin.prev_model = None
        for parameter in get_last_fc_layer(context.model)[1].parameters():
            change.set(parameter, requires_grad=True)
        return "LFL: the teacher was dropped with the last task, and the last layer may learn again"
    plugin.prev_model = teacher_without_tasks(plugin.prev_model, context)
    return "LFL: the tasks' updates and heads taken out of the teacher"


@register_purger(stock.EarlyStoppingPlugin)
def purge_best_state(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Delete EarlyStopping's copy of the best weights, so that a current training starts its search again."""
    change.set(plugin, best_state=None, best_val=None, best_step=None)
    return "EarlyStopping: its copy of the best weights was dropped"
