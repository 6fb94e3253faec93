"""Plugins that are taught by a copy of the model as it was: LwF and LFL."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from avalanche.training.plugins import LFLPlugin, LwFPlugin
from avalanche.training.utils import freeze_everything, get_last_fc_layer
from torch import nn

from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.purging.registry import PurgeContext, SavedState, StateAdapter, register_adapter
from avalanche_amnesia.unlearning.task_modules import remove_task_modules


def without_tasks(teacher: nn.Module, context: PurgeContext) -> nn.Module:
    """A copy of a teacher, which is the last committed state, without the tasks that go."""
    result = deepcopy(teacher)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            new = context.removal.before.get(name, context.removal.values.get(name))
            if new is not None:
                parameter.copy_(new)
    with Transaction() as of_copy:
        for task in context.tasks:
            remove_task_modules(result, task, of_copy)
        of_copy.commit()
    return result


def _saved_teacher(teacher: nn.Module | None) -> SavedState:
    if teacher is None:
        return SavedState(data={"teacher": False})
    return SavedState({name: value.clone() for name, value in teacher.state_dict().items()}, {"teacher": True})


def _loaded_teacher(state: SavedState, model: nn.Module) -> nn.Module | None:
    if not state.data["teacher"]:
        return None
    teacher = deepcopy(model)
    teacher.load_state_dict(state.tensors)
    freeze_everything(teacher)
    return teacher


@register_adapter(LwFPlugin)
class LwFAdapter(StateAdapter):
    """A teacher with all heads, and the classes that each of them has seen."""

    def save(self, plugin: Any) -> SavedState:
        """The teacher's state and the classes."""
        state = _saved_teacher(plugin.lwf.prev_model)
        classes = {str(task): sorted(map(int, seen)) for task, seen in plugin.lwf.prev_classes_by_task.items()}
        return SavedState(state.tensors, {**state.data, "classes": classes, "expcount": plugin.lwf.expcount})

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Rebuild the teacher from the model."""
        plugin.lwf.prev_model = _loaded_teacher(state, model)
        plugin.lwf.expcount = state.data["expcount"]
        classes = {int(task): set(seen) for task, seen in state.data["classes"].items()}
        plugin.lwf.prev_classes_by_task = defaultdict(set, classes)

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Take updates and heads out of the teacher; without a task left there is none."""
        method = plugin.lwf
        change.set(method, prev_model=method.prev_model, prev_classes_by_task=deepcopy(method.prev_classes_by_task))
        for task in context.tasks:
            method.prev_classes_by_task.pop(task, None)
        if method.prev_model is None:
            return "LwF: no teacher yet"
        teacher = without_tasks(method.prev_model, context)
        method.prev_model = teacher if method.prev_classes_by_task else None
        return "LwF: the tasks' updates and heads taken out of the teacher"


@register_adapter(LFLPlugin)
class LFLAdapter(StateAdapter):
    """A teacher of the features, beside a last layer that the plugin froze."""

    def save(self, plugin: Any) -> SavedState:
        """The teacher's state."""
        return _saved_teacher(plugin.prev_model)

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Rebuild the teacher from the model."""
        plugin.prev_model = _loaded_teacher(state, model)

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Take updates out of the teacher; without a task left there is none, and the last layer learns again."""
        if plugin.prev_model is None:
            return "LFL: no teacher yet"
        change.keep(plugin, "prev_model")
        if set(context.order) <= set(context.tasks):
            plugin.prev_model = None
            for parameter in get_last_fc_layer(context.model)[1].parameters():
                change.set(parameter, requires_grad=True)
            return "LFL: the teacher was dropped with the last task, and the last layer may learn again"
        plugin.prev_model = without_tasks(plugin.prev_model, context)
        return "LFL: the tasks' updates and heads taken out of the teacher"
