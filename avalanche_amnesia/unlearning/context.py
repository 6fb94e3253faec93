"""Context of one unlearning: the tasks to unlearn, their parameters, and intermediate results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from avalanche.models import MultiHeadClassifier
from torch import Tensor, nn

from avalanche_amnesia.audit.record import UnlearningPlan
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction


@dataclass(eq=False)
class UnlearningContext:
    """Inputs and intermediate results of one unlearning, for its steps and for purgers (functions that clean plugins).

    Attributes:
        strategy: the strategy.
        tasks: labels of the tasks to unlearn.
        event: the moment of the request, e.g. ``"after task 3"``.
        ledger: ledger of the strategy's tasks.
        trajectory: trajectory of the strategy's tasks.
        counters: task → Avalanche's counter of the experience that trained it.
        purgers: Avalanche's and the user's plugins, the strategy and its criterion, each with its purger.
        unknown: plugins with learned state that have no purger.
        compensations: plugins that compensate the loss of remaining tasks.
        repair: plugin that trains remaining tasks on stored samples; None: no repair.
        shared_state: names of buffers that trainings changed for all tasks together.
        has_listeners: whether plugins, metrics or loggers are called before the tasks are removed.
        before: parameter name → values before the task in training; None between tasks.
        in_training: the task in training; None between tasks.
        unrecorded: tasks in the model that are not in the ledger, because the model was loaded with them.
        started: ``time.perf_counter()`` when the request came.
        order: remaining tasks when the request came, in training order.
        writers: tasks and repairs (negative numbers) of the trajectory when the request came, in order.
        parameters: name → parameter of the model before the removal.
        own_parameters: names of the parameters that only the unlearned tasks own.
        hashes: name → hash of every tensor of the model before the removal.
        removal: changes of the shared parameters.
        plan: the plan of the unlearning.
    """

    strategy: Strategy
    tasks: tuple[int, ...]
    event: str
    ledger: TaskLedger
    trajectory: Trajectory
    counters: Mapping[int, int]
    purgers: Sequence[tuple[object, Callable[..., str]]]
    unknown: Sequence[object] = ()
    compensations: Sequence[Any] = ()
    repair: Any = None
    shared_state: Collection[str] = ()
    has_listeners: bool = True
    before: dict[str, Tensor] | None = None
    in_training: int | None = None
    unrecorded: Collection[int] = ()
    started: float = field(default_factory=time.perf_counter)
    order: tuple[int, ...] = field(init=False)
    writers: tuple[int, ...] = field(init=False)
    parameters: Mapping[str, nn.Parameter] = field(init=False)
    own_parameters: frozenset[str] = field(init=False)
    hashes: Mapping[str, str] = field(init=False)
    removal: Removal = field(init=False)
    plan: UnlearningPlan = field(init=False)

    def __post_init__(self) -> None:
        self.order, self.writers = self.ledger.remaining, tuple(self.trajectory.logs)

    @property
    def model(self) -> nn.Module:
        """Return the strategy's model."""
        return cast(nn.Module, self.strategy.model)

    @property
    def remaining(self) -> tuple[int, ...]:
        """Return the trained tasks that this unlearning does not remove, in training order."""
        return tuple(task for task in self.order if task not in self.tasks)


def own_parameters(model: nn.Module, *tasks: int) -> frozenset[str]:
    """Return the names of all parameters that belong to one of ``tasks`` alone (heads, normalisation layers)."""
    stores = ((MultiHeadModel, "heads"), (MultiHeadClassifier, "classifiers"))
    return frozenset(
        f"{path}.{store}.{task}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for kind, store in stores
        if isinstance(module, kind)
        for task in tasks
        if str(task) in (heads := getattr(module, store))
        for name, _ in heads[str(task)].named_parameters()
    )


def remove_task_modules(model: nn.Module, task: int, change: Transaction) -> None:
    """Remove a task's heads, masks and embeddings from a model of this package or Avalanche, undoable by ``change``."""
    for module in list(model.modules()):
        if isinstance(module, MultiHeadModel):
            change.call(module.restore_task_state, module.task_state())
            if task in module.tasks:
                module.remove_task(task)
            continue
        if isinstance(module, MultiHeadClassifier):
            heads, units = module.classifiers, f"active_units_T{task}"
            change.set(heads, _modules={name: head for name, head in heads._modules.items() if name != str(task)})
            change.set(module, _buffers={name: held for name, held in module._buffers.items() if name != units})
        if hasattr(module, "known_train_tasks_labels"):
            labels: Any = module.known_train_tasks_labels
            change.set(module, known_train_tasks_labels=labels - {task})
