"""Unlearning as one operation: worked out first, then applied as a whole or not at all."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia.bits import same_bits, tensor_hash
from avalanche_amnesia.models import TaskMaskedModel
from avalanche_amnesia.unlearning.compensation import Compensation
from avalanche_amnesia.unlearning.ledger import TaskLedger
from avalanche_amnesia.unlearning.purge import PurgeContext, holds_learned_state, purger_of
from avalanche_amnesia.unlearning.record import (
    Claim,
    RepairSummary,
    SharedEntries,
    TensorChange,
    UnlearningPlan,
    UnlearningRecord,
)
from avalanche_amnesia.unlearning.repair import Repair, carry_out, repairable
from avalanche_amnesia.unlearning.task_modules import own_parameters, remove_task_modules
from avalanche_amnesia.unlearning.trajectory import Readers, Removal, Trajectory


@dataclass
class Subject:
    """Everything that an unlearning looks at and changes.

    Attributes:
        model: the model.
        optimizers: whose state and parameter lists are cleaned.
        trajectory: the tasks' updates.
        ledger: who may be asked for.
        plugins: the host's plugins, to be purged.
        compensations: what makes up to the remaining tasks.
        repair: what trains the affected tasks again afterwards; None: nothing does.
        counters: task → the host's experience counter when it was trained.
        before: values before a task that is in training, by parameter name; None between tasks. Replaced in place.
        optimized: the host's own book of optimized parameters, by name; cleaned too.
        tainted: remaining tasks whose training saw a task that was unlearned later.
        exact_host: whether the training itself is reproducible from (seed, remaining tasks) alone.
        known: every task of the stream, None where that is not known.
        iteration: training iterations finished.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    trajectory: Trajectory
    ledger: TaskLedger
    plugins: Sequence[object]
    compensations: Sequence[Compensation]
    counters: Mapping[int, int]
    before: dict[str, Tensor] | None
    optimized: dict[str, Any] | None
    tainted: set[int]
    exact_host: bool
    known: frozenset[int] | None = None
    iteration: int = 0
    repair: Repair | None = None


@dataclass(frozen=True)
class Preparation:
    """A checked request, worked out: the plan to show and the change to make.

    Attributes:
        plan: to show.
        removal: of the shared tensors.
        changed: tensor name → bool tensor of the entries that the removal changes.
        tainted: remaining tasks that will have been trained beside a task that is gone.
        started: when the work began.
        own: names of the parameters that go with the tasks.
    """

    plan: UnlearningPlan
    removal: Removal
    changed: Mapping[str, Tensor]
    tainted: frozenset[int]
    started: float
    own: frozenset[str] = field(default_factory=frozenset)


def prepare(subject: Subject, tasks: Iterable[int], event: str) -> Preparation:
    """Check a request and work out what it would do; changes nothing.

    Raises:
        RequestError: if the ledger does not allow it.
    """
    started = time.perf_counter()
    tasks = subject.ledger.check(tasks, event, subject.known)
    model, trajectory = subject.model, subject.trajectory
    parameters = dict(model.named_parameters())
    own = frozenset().union(*(own_parameters(model, task) for task in tasks))
    shared = {name: p.detach() for name, p in parameters.items() if name not in own}
    remaining = [task for task in subject.ledger.remaining if task not in tasks]
    readers = _readers(model, remaining)
    removal = trajectory.remove(tasks, shared, subject.before, readers)
    tainted = {t for t in remaining if t in subject.tainted or subject.ledger.present(t) & set(tasks)}
    exact = subject.exact_host and not tainted and not removal.shared and subject.before is None
    claim: Claim = "exact" if exact else "approximate"
    stateful = [plugin for plugin in subject.plugins if purger_of(plugin) is None and holds_learned_state(plugin)]
    changed = {name: ~same_bits(value, shared[name]) for name, value in removal.values.items()}
    affected = _affected(model, remaining, changed)
    covered = tuple(task for task in affected if any(c.covers(task, tasks) for c in subject.compensations))
    plan = UnlearningPlan(
        tasks=tuple(tasks),
        event=event,
        entries={name: int(entries.sum()) for name, entries in sorted(changed.items())},
        removed=tuple(sorted(own | _task_buffers(model, tasks))),
        affected=affected,
        compensated=covered,
        shared=_shared_entries(removal, readers),
        claim=claim,
        trajectory_bytes=sum(trajectory.nbytes(task) for task in tasks),
        purges=tuple(type(plugin).__name__ for plugin in subject.plugins if purger_of(plugin)),
        unpurged=tuple(type(plugin).__name__ for plugin in stateful),
        repaired=repairable(subject.repair, model, affected, tainted),
    )
    return Preparation(plan, removal, changed, frozenset(tainted), started, own)


def _task_buffers(model: nn.Module, tasks: Sequence[int]) -> frozenset[str]:
    if not isinstance(model, TaskMaskedModel):
        return frozenset()
    return frozenset(model.buffer_names(tasks))


def _readers(model: nn.Module, remaining: Sequence[int]) -> Readers:
    """What the remaining tasks read, where that stays as it is whoever wrote it."""
    if not isinstance(model, TaskMaskedModel) or not model.keeps_shared_entries:
        return {}
    return {
        task: {f"backbone.{name}": use > 0 for name, use in model.graph.parameter_use(model.masks[task]).items()}
        for task in remaining
    }


def _shared_entries(removal: Removal, readers: Readers) -> dict[str, SharedEntries]:
    return {
        name: SharedEntries(
            entries=int(stays.sum()),
            tasks=tuple(task for task, reads in readers.items() if bool((reads[name].cpu() & stays).any())),
        )
        for name, stays in sorted(removal.shared.items())
    }


def _affected(model: nn.Module, remaining: Sequence[int], changed: Mapping[str, Tensor]) -> tuple[int, ...]:
    if not changed:
        return ()
    if not isinstance(model, TaskMaskedModel):
        return tuple(remaining)  # without masks every task uses every entry
    return tuple(
        task
        for task in remaining
        if task not in model.masks  # trained by a strategy that does not mask: it uses every entry
        or not own_parameters(model, task).isdisjoint(changed)  # a repair that is taken out had trained them
        or any(
            bool((changed[f"backbone.{name}"] & (use > 0)).any())
            for name, use in model.graph.parameter_use(model.masks[task]).items()
            if f"backbone.{name}" in changed
        )
    )


@torch.no_grad()
def apply(
    subject: Subject, preparation: Preparation, announce: Callable[[str, UnlearningRecord | None], None]
) -> UnlearningRecord:
    """Carry a preparation out as a whole; any exception leaves everything as it was.

    Args:
        subject: what was prepared.
        preparation: what :func:`prepare` returned, just now.
        announce: called with ``before_unlearning`` and ``after_unlearning``, inside the all-or-nothing part.
    """
    plan, removal = preparation.plan, preparation.removal
    parameters = dict(subject.model.named_parameters())
    with ExitStack() as undo:
        announce("before_unlearning", None)
        hashes = _hashes(subject.model, [*removal.values, *plan.removed])
        order = subject.ledger.remaining
        purged = _purge_optimizers(subject, preparation.own, undo)
        for name, value in removal.values.items():
            undo.callback(parameters[name].copy_, parameters[name].detach().clone())
            parameters[name].copy_(value)
        _replace(subject.before, removal.before, preparation.own, undo)
        for task in plan.tasks:
            remove_task_modules(subject.model, task, undo)
        for compensation in subject.compensations:
            purged += compensation.compensate(subject.model, plan.tasks, undo)
        undo.callback(subject.trajectory.restore, subject.trajectory.logs)
        subject.trajectory.apply(removal)
        repaired = _repair(subject, preparation, purged, undo)
        _hold_own(subject, undo)
        context = PurgeContext(plan.tasks, order, subject.counters, preparation.own, removal)
        for plugin in subject.plugins:
            purger = purger_of(plugin)
            if purger is not None:
                purged.append(purger(plugin, context, undo))
        undo.callback(subject.ledger.load_state_dict, subject.ledger.state_dict())
        subject.ledger.forget(plan.tasks, plan.event)
        undo.callback(subject.tainted.update, set(subject.tainted))
        undo.callback(subject.tainted.clear)
        subject.tainted.clear()
        subject.tainted.update(preparation.tainted)
        after = _hashes(subject.model, list(removal.values))
        record = UnlearningRecord(
            plan=plan,
            changes=tuple(TensorChange(name, digest, after.get(name)) for name, digest in hashes.items()),
            purged=tuple(purged),
            remaining=subject.ledger.remaining,
            n_trained=subject.ledger.n_trained,
            iteration=subject.iteration,
            seconds=time.perf_counter() - preparation.started,
            repair=repaired,
        )
        announce("after_unlearning", record)
        subject.trajectory.settle()
        undo.pop_all()
    return record


def _repair(subject: Subject, preparation: Preparation, purged: list[str], undo: ExitStack) -> RepairSummary | None:
    """Drop the repair's samples of the tasks that go, and let it train the affected ones."""
    repair, model, tasks = subject.repair, subject.model, preparation.plan.repaired
    if repair is None:
        return None
    purged.append(repair.forget(preparation.plan.tasks, undo))
    if not tasks:
        return None
    assert isinstance(model, TaskMaskedModel)
    return carry_out(
        repair,
        model,
        subject.optimizers[0],
        subject.trajectory,
        tasks=tasks,
        compensated=preparation.plan.compensated,
        changed=preparation.changed,
        before=subject.before,
        undo=undo,
    )


def _hold_own(subject: Subject, undo: ExitStack) -> None:
    """What the remaining tasks have of their own no other task trains: one in training starts from it as it is now."""
    model, before = subject.model, subject.before
    if before is None or not isinstance(model, TaskMaskedModel):
        return
    tasks = [task for task in model.tasks if task != model.current_task]
    own = frozenset().union(*(own_parameters(model, task) for task in tasks))
    undo.callback(before.update, {name: before[name] for name in own})
    before.update({name: p.detach().clone() for name, p in model.named_parameters() if name in own})


def book_only(
    subject: Subject, preparation: Preparation, announce: Callable[[str, UnlearningRecord | None], None]
) -> UnlearningRecord:
    """The control: enter the request into the book and announce it, but leave everything as it is."""
    nothing: dict[str, Any] = {
        "entries": {},
        "removed": (),
        "affected": (),
        "compensated": (),
        "repaired": (),
        "shared": {},
        "trajectory_bytes": 0,
    }
    plan = replace(preparation.plan, claim="approximate", **nothing)
    with ExitStack() as undo:
        announce("before_unlearning", None)
        undo.callback(subject.ledger.load_state_dict, subject.ledger.state_dict())
        subject.ledger.forget(plan.tasks, plan.event)
        record = UnlearningRecord(
            plan=plan,
            changes=(),
            purged=("nothing: requests are only booked",),
            remaining=subject.ledger.remaining,
            n_trained=subject.ledger.n_trained,
            iteration=subject.iteration,
            seconds=time.perf_counter() - preparation.started,
        )
        announce("after_unlearning", record)
        undo.pop_all()
    return record


def _hashes(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    state = model.state_dict()
    return {name: tensor_hash(state[name]) for name in sorted(names) if name in state}


def _replace(store: dict[str, Tensor] | None, new: Mapping[str, Tensor], gone: frozenset[str], undo: ExitStack) -> None:
    if store is None:
        return
    undo.callback(store.update, dict(store))
    store.update(new)
    for name in gone & set(store):
        del store[name]


def _purge_optimizers(subject: Subject, own: frozenset[str], undo: ExitStack) -> list[str]:
    """Drop all optimizer state (moments mix every task that they saw), gradients, and the parameters that go."""
    for parameter in subject.model.parameters():
        undo.callback(setattr, parameter, "grad", parameter.grad)
        parameter.grad = None
    gone = {id(p) for name, p in subject.model.named_parameters() if name in own}
    for optimizer in subject.optimizers:
        undo.callback(setattr, optimizer, "state", optimizer.state)
        optimizer.state = defaultdict(dict)
        for group in optimizer.param_groups:
            undo.callback(group.__setitem__, "params", group["params"])
            group["params"] = [p for p in group["params"] if id(p) not in gone]
    if subject.optimized is not None:
        undo.callback(
            subject.optimized.update, {name: subject.optimized[name] for name in own & set(subject.optimized)}
        )
        for name in own:
            subject.optimized.pop(name, None)
    return ["optimizer: its state was dropped, with the tasks' own parameters"] if subject.optimizers else []
