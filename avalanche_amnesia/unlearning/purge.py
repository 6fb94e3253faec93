"""What a host's plugins keep of a task, and how to take it out. One purger per plugin class, registered.

Without this a stock strategy brings a forgotten task back: EWC pulls the weights to anchors that hold it, LwF is
taught by a model that knows it, Replay trains on its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.plugins import EWCPlugin, LwFPlugin, ReplayPlugin
from avalanche.training.utils import ParamData
from torch import Tensor, nn

from avalanche_amnesia.unlearning.task_modules import remove_task_modules
from avalanche_amnesia.unlearning.trajectory import Removal


@dataclass(frozen=True)
class PurgeContext:
    """What is unlearned, for those who clean up behind it.

    Attributes:
        tasks: the tasks that go.
        order: all tasks trained so far and not unlearned before, in training order, those that go included.
        counters: task → the strategy's experience counter when it was trained.
        own_parameters: names of the parameters that belonged to the tasks alone.
        removal: the change of the shared parameters.
    """

    tasks: tuple[int, ...]
    order: tuple[int, ...]
    counters: Mapping[int, int]
    own_parameters: frozenset[str]
    removal: Removal


Purger = Callable[[Any, PurgeContext, ExitStack], str]
_PURGERS: dict[type, Purger] = {}


def register_purger(plugin_class: type) -> Callable[[Purger], Purger]:
    """Decorator: the function cleans plugins of this class.

    The function gets the plugin, a :class:`PurgeContext` and an ``ExitStack`` that must receive the way back of
    every change *before* the change; it returns one line for the record.
    """

    def register(purger: Purger) -> Purger:
        _PURGERS[plugin_class] = purger
        return purger

    return register


def purger_of(plugin: object) -> Purger | None:
    """The registered purger of a plugin's class or its nearest base, None if there is none."""
    return next((_PURGERS[kind] for kind in type(plugin).__mro__ if kind in _PURGERS), None)


def holds_learned_state(plugin: object, depth: int = 3) -> bool:
    """Whether a plugin without a purger keeps tensors, modules or data in its attributes (three containers deep)."""
    return any(_is_state(value, depth) for value in vars(plugin).values()) if hasattr(plugin, "__dict__") else False


def _is_state(value: object, depth: int) -> bool:
    if isinstance(value, (Tensor, ParamData, nn.Module, AvalancheDataset, torch.utils.data.Dataset)):
        return True
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return any(_is_state(item, depth - 1) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_is_state(item, depth - 1) for item in value)
    return False


@register_purger(EWCPlugin)
def _purge_ewc(plugin: Any, context: PurgeContext, undo: ExitStack) -> str:
    undo.callback(setattr, plugin, "saved_params", deepcopy(plugin.saved_params))
    undo.callback(setattr, plugin, "importances", deepcopy(plugin.importances))
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


def _updates_before(context: PurgeContext, task: int | None) -> dict[str, Tensor]:
    """Sum of the updates, among those that go, that a state saved after ``task`` holds."""
    held = context.order[: context.order.index(task)] if task in context.order else context.order
    total: dict[str, Tensor] = {}
    for gone in set(held) & set(context.tasks):
        for name, update in context.removal.updates[gone].items():
            total[name] = total[name] + update if name in total else update
    return total


@register_purger(LwFPlugin)
def _purge_lwf(plugin: Any, context: PurgeContext, undo: ExitStack) -> str:
    method = plugin.lwf
    undo.callback(setattr, method, "prev_model", method.prev_model)
    undo.callback(setattr, method, "prev_classes_by_task", deepcopy(method.prev_classes_by_task))
    for task in context.tasks:
        method.prev_classes_by_task.pop(task, None)
    if method.prev_model is None:
        return "LwF: no teacher yet"
    teacher = deepcopy(method.prev_model)
    removal = context.removal
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            new = removal.before.get(name, removal.values.get(name))  # the teacher is the last committed state
            if new is not None:
                parameter.copy_(new)
    with ExitStack() as of_copy:
        for task in context.tasks:
            remove_task_modules(teacher, task, of_copy)
        of_copy.pop_all()
    method.prev_model = teacher if method.prev_classes_by_task else None
    return "LwF: the tasks' updates and heads taken out of the teacher"


@register_purger(ReplayPlugin)
def _purge_replay(plugin: Any, context: PurgeContext, undo: ExitStack) -> str:
    removed = _purge_buffer(plugin.storage_policy, set(context.tasks), undo)
    return f"Replay: {removed} samples of the tasks dropped"


def _purge_buffer(policy: Any, tasks: set[int], undo: ExitStack) -> int:
    groups = getattr(policy, "buffer_groups", None)
    if groups is not None:
        undo.callback(setattr, policy, "buffer_groups", dict(groups))
        removed = sum(_purge_buffer(group, tasks, undo) for group in groups.values())
        policy.buffer_groups = {key: group for key, group in groups.items() if len(group.buffer)}
        return removed
    buffer = policy.buffer
    if len(buffer) == 0:
        return 0
    kept = [i for i, task in enumerate(buffer.targets_task_labels) if int(task) not in tasks]
    if len(kept) == len(buffer):
        return 0
    undo.callback(setattr, policy, "buffer", buffer)
    policy.buffer = buffer.subset(kept)
    weights = getattr(policy, "_buffer_weights", None)
    if weights is not None:
        undo.callback(setattr, policy, "_buffer_weights", weights)
        policy._buffer_weights = weights[kept]
    return len(buffer) - len(kept)
