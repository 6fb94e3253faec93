"""Plugins that keep a copy of the model as it was: LwF and LFL are taught by it, early stopping returns to it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from avalanche.training.plugins import EarlyStoppingPlugin, LFLPlugin, LwFPlugin
from avalanche.training.utils import get_last_fc_layer
from torch import nn

from avalanche_amnesia.models.task_store import whole
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.purgers import register_purger
from avalanche_amnesia.unlearning.task_modules import remove_task_modules


def without_tasks(teacher: nn.Module, context: UnlearningContext) -> nn.Module:
    """A copy of a teacher, which is the last committed state, without the tasks that go."""
    result = deepcopy(teacher)
    with torch.no_grad(), whole(result):
        for name, parameter in result.named_parameters():
            new = context.removal.before.get(name, context.removal.values.get(name))
            if new is not None:
                parameter.copy_(new)
    with Transaction() as of_copy:
        for task in context.tasks:
            remove_task_modules(result, task, of_copy)
        of_copy.commit()
    return result


@register_purger(LwFPlugin)
def purge_lwf(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
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


@register_purger(LFLPlugin)
def purge_lfl(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Take updates out of the teacher of the features; without a task left the frozen last layer learns again."""
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


@register_purger(EarlyStoppingPlugin)
def purge_best_state(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    """Drop the copy; in the middle of a training the search for the best weights begins again."""
    change.set(plugin, best_state=None, best_val=None, best_step=None)
    return "EarlyStopping: its copy of the best weights was dropped"
