"""An unlearning between its request and its record: the tasks that go, what is theirs, and what was worked out."""

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
from avalanche_amnesia.unlearning.compensation import Compensation, Repair


@dataclass(eq=False)
class UnlearningContext:
    """All that an unlearning looks at, works out and changes; purgers read it too.

    Attributes:
        strategy: whose tasks go.
        tasks: labels of the tasks that go.
        event: when they were asked for, e.g. ``"after task 3"``.
        ledger: of the strategy's tasks.
        trajectory: of the strategy's tasks.
        counters: task → Avalanche's counter of the experience that trained it.
        purgers: plugins of the host and of the user, the strategy and its criterion, each with what cleans it.
        unknown: those of them that keep something learned and have no purger.
        compensations: make up for what remaining tasks lose.
        repair: trains remaining tasks on their samples; None: nothing does.
        shared_state: names of tensors beside the parameters that trainings changed for all tasks together.
        before: parameter name → values before the task in training; None between tasks.
        in_training: the task in training; None between tasks.
        unrecorded: tasks that the model has and the ledger does not know: it was loaded with them.
        started: ``time.perf_counter()`` when the request came.
        order: remaining tasks when the request came, in training order.
        writers: tasks and repairs (negative numbers) of the trajectory when the request came, in order.
        parameters: name → parameter of the model, with the tasks that go.
        own_parameters: names of the parameters that go with the tasks.
        hashes: name → hash of every tensor of the model, with the tasks that go.
        removal: what goes out of the shared parameters.
        plan: what changes, as data.
    """

    strategy: Strategy
    tasks: tuple[int, ...]
    event: str
    ledger: TaskLedger
    trajectory: Trajectory
    counters: Mapping[int, int]
    purgers: Sequence[tuple[object, Callable[..., str]]]
    unknown: Sequence[object] = ()
    compensations: Sequence[Compensation] = ()
    repair: Repair | None = None
    shared_state: Collection[str] = ()
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
        """The strategy's model."""
        return cast(nn.Module, self.strategy.model)

    @property
    def remaining(self) -> tuple[int, ...]:
        """Tasks that remain without those that go, in training order."""
        return tuple(task for task in self.order if task not in self.tasks)


# Parts of a model that belong to one task only, and how to take them out ----------------------------------------------


def own_parameters(model: nn.Module, *tasks: int) -> frozenset[str]:
    """Names of the parameters that belong only to these tasks (their heads, their normalisation)."""
    return frozenset(
        f"{name}{container}.{task}.{inner}"
        for name, module in _shared_modules(model)
        for container in _containers(module)
        for task in tasks
        if str(task) in (held := getattr(module, container))
        for inner, _ in held[str(task)].named_parameters()
    )


def _shared_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that no task has of its own, each with the prefix of its parts' names; however many tasks there are."""
    found = [("", model)]
    for prefix, module in found:  # which grows meanwhile
        containers = _containers(module)
        inner = [(name, part) for name, part in module._modules.items() if part is not None and name not in containers]
        found += [(f"{prefix}{name}.", part) for name, part in inner]
    return found


def _containers(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, MultiHeadModel):
        return module.task_containers
    return ("classifiers",) if isinstance(module, MultiHeadClassifier) else ()


def remove_task_modules(model: nn.Module, task: int, change: Transaction) -> None:
    """Take the task's heads, masks and embeddings out of a model of this package, or one of Avalanche's."""
    for _, module in _shared_modules(model):
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
