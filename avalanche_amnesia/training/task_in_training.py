"""State of a task's training: a copy of the values before the task, and data to drop when the training ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_store import finished_tensors
from avalanche_amnesia.optimizers import copy_state
from avalanche_amnesia.saving.known_objects import is_known
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.update_rules import Adjuster


class TaskInTraining:
    """State of a task in training, stored by a plugin from the check of its experience until its weights are final.

    Subclasses add attributes of a method; an attribute exists once the method has set it.

    Args:
        task: its label.

    Attributes:
        snapshot: values before the task; None until its training begins.
        adjuster: protects entries that other tasks use.
        guards_others: True if the optimizer also changes parameters without a gradient, so that other tasks' heads and
            norms are restored after every step.
    """

    adjuster: Adjuster
    guards_others: bool

    def __init__(self, task: int) -> None:
        self.task = task
        self.snapshot: TaskSnapshot | None = None

    @property
    def before(self) -> TaskSnapshot:
        """Return the copy of parameters and states before the task; RuntimeError if its training has not begun."""
        if self.snapshot is None:
            raise RuntimeError(f"the training of task {self.task} has not begun")
        return self.snapshot


class TaskSnapshot:
    """Copy of parameters, the task's running statistics, optimizer state and user plugins' states before a task.

    Taken when the task begins. An optimizer that is reset for every task has no state then. Modules of finished tasks
    are copied separately: no training changes them and no trajectory records them, but a user's plugin may write into
    them.
    """

    def __init__(self, strategy: Strategy, task: int) -> None:
        model: nn.Module = strategy.model
        self.task = task
        self.moments = copy_state(strategy.optimizer.state)
        """The optimizer's state, by parameter; emptied at an unlearning, because it may reveal the unlearned task."""
        self.states = user_plugin_states(strategy)
        """States of the user's plugins; emptied at an unlearning, for the reason given for ``moments``."""
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        # Other tasks' buffers are not copied: they do not change, and their task may be unlearned meanwhile.
        buffers = dict(model.named_buffers())
        if isinstance(model, TaskMaskedModel):
            buffers = {name: buffers[name] for name in model.buffer_names([task]) if name in buffers}
        elif isinstance(model, MultiHeadModel):  # without masks, tasks may share buffers
            of_others = set(model.buffer_names([other for other in model.tasks if other != task]))
            buffers = {name: buffer for name, buffer in buffers.items() if name not in of_others}
        self._statistics = {name: buffer.clone() for name, buffer in buffers.items()}
        self.finished = copy_finished(model)

    @torch.no_grad()
    def restore(self, strategy: Strategy) -> None:
        """Undo the task: restore optimizer state, existing parameters and buffers, and user plugins' states."""
        model: nn.Module = strategy.model
        strategy.optimizer.state = copy_state(self.moments)
        for name, parameter in model.named_parameters():
            if name in self.values:
                parameter.copy_(self.values[name])
        for name, buffer in model.named_buffers():
            if name in self._statistics:
                buffer.copy_(self._statistics[name])
        self.restore_finished_tasks(model)
        restore_user_plugins(self.states)

    @torch.no_grad()
    def restore_finished_tasks(self, model: nn.Module) -> None:
        """Undo changes that user plugins made to the heads and norms of finished tasks since this task began."""
        for name, tensor in finished_tensors(model).items():
            if name in self.finished:
                tensor.copy_(self.finished[name])

    @torch.no_grad()
    def commit(self, parameters: Mapping[str, nn.Parameter], keep: Mapping[str, Tensor]) -> None:
        """Keep the task's changes where ``keep`` is True; restore other entries, bit for bit, to their old values."""
        for name, kept in keep.items():
            parameter = parameters[name]
            parameter.copy_(torch.where(kept, parameter, self.values[name]))


States = Sequence[tuple[Any, Any]]
"""User plugins, each with a copy of its ``state()``."""


def user_plugin_states(strategy: Strategy) -> States:
    """Return each user plugin that has a ``load_state``, with a copy of its ``state()``."""
    users = [p for p in strategy.plugins if hasattr(type(p), "load_state") and not is_known(p)]
    return [(plugin, deepcopy(plugin.state())) for plugin in users]


def restore_user_plugins(states: States) -> None:
    """Load into each plugin a copy of its stored state."""
    for plugin, state in states:
        plugin.load_state(deepcopy(state))


def copy_finished(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters and buffers in heads and norm layers of finished tasks, by name."""
    return {name: tensor.detach().clone() for name, tensor in finished_tensors(model).items()}
