"""Carrying an unlearning out, as a whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.audit.record import RepairSummary, TensorChange, UnlearningRecord
from avalanche_amnesia.bits import map_two_threads, state_hashes
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.trajectory.entries import put, take
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.optimizer_state import purge_optimizers
from avalanche_amnesia.unlearning.planning import Preparation
from avalanche_amnesia.unlearning.purging.registry import PurgeContext, adapter_of
from avalanche_amnesia.unlearning.repair import carry_out
from avalanche_amnesia.unlearning.subject import Subject
from avalanche_amnesia.unlearning.task_modules import own_parameters, remove_task_modules

Announce = Callable[[str, UnlearningRecord | None, Transaction], None]


@torch.no_grad()
def apply(subject: Subject, preparation: Preparation, announce: Announce) -> UnlearningRecord:
    """Carry a preparation out as a whole; any exception leaves everything as it was.

    Args:
        subject: what was prepared.
        preparation: what :func:`prepare` returned, just now.
        announce: called with ``before_unlearning`` and ``after_unlearning``, inside the all-or-nothing part, with the
            record once there is one, and what receives the way back of anything that it changes.
    """
    plan, removal = preparation.plan, preparation.removal
    parameters = dict(subject.model.named_parameters())
    with Transaction() as change:
        announce("before_unlearning", None, change)
        before = preparation.hashes
        # With the tasks that go still in it: adapters tell by it which stored states knew them.
        order = subject.ledger.remaining
        # First: it finds the tasks' own parameters, and the entries that change, in the model as it still is.
        purged = purge_optimizers(subject, preparation, change)
        _move(removal, parameters, change)
        _replace(subject.before, removal.before, preparation.own, change)
        for task in plan.tasks:
            remove_task_modules(subject.model, task, change)
        change.call(subject.trajectory.restore, subject.trajectory.logs)
        subject.trajectory.apply(removal)
        # Compensations and repairs build on a model and a trajectory without the tasks.
        for compensation in subject.compensations:
            purged += compensation.compensate(subject.model, plan.tasks, removal, change)
        repaired = _repair(subject, preparation, purged, change)
        _hold_own(subject, change)
        # Units move last: all that was worked out before names entries by their places until then.
        if subject.rearrange is not None:
            subject.rearrange(change)
        context = PurgeContext(
            tasks=plan.tasks,
            order=order,
            writers=tuple(preparation.logs),
            counters=subject.counters,
            own_parameters=preparation.own,
            removal=removal,
            model=subject.model,
            in_training=subject.in_training,
        )
        for plugin in subject.plugins:
            adapter = adapter_of(plugin)
            if adapter is not None:
                purged.append(adapter.purge(plugin, context, change))
        change.call(subject.ledger.load_state_dict, subject.ledger.state_dict())
        subject.ledger.forget(plan.tasks, plan.event)
        after = state_hashes(subject.model.state_dict())
        subject.claims.unlearned(preparation.tainted, after, subject.in_training, change)
        record = UnlearningRecord(
            plan=plan,
            changes=tuple(
                TensorChange(name, before.get(name), after.get(name))
                for name in sorted({*before, *after})
                if before.get(name) != after.get(name)
            ),
            unchanged={name: digest for name, digest in after.items() if before.get(name) == digest},
            purged=tuple(purged),
            remaining=subject.ledger.remaining,
            n_trained=subject.ledger.n_trained,
            iteration=subject.iteration,
            seconds=time.perf_counter() - preparation.started,
            time=_now(),
            provenance=subject.provenance,
            fingerprint=preparation.fingerprint,
            repair=repaired,
        )
        announce("after_unlearning", record, change)
        # Old log files are deleted last, when all else has succeeded; a failure here can still be taken back.
        subject.trajectory.settle()
        change.commit()
    return record


def ledger_only(subject: Subject, preparation: Preparation, announce: Announce) -> UnlearningRecord:
    """Enter the request into the ledger and announce it, and leave everything as it is: a control."""
    nothing: dict[str, Any] = {
        "entries": {},
        "removed": (),
        "affected": (),
        "compensated": (),
        "repaired": (),
        "shared": {},
        "trajectory_bytes": 0,
    }
    reasons = ("obey=False: requests are only entered into the ledger",)
    plan = replace(preparation.plan, claim="approximate", reasons=reasons, **nothing)
    with Transaction() as change:
        announce("before_unlearning", None, change)
        change.call(subject.ledger.load_state_dict, subject.ledger.state_dict())
        subject.ledger.forget(plan.tasks, plan.event)
        record = UnlearningRecord(
            plan=plan,
            changes=(),
            purged=("nothing: requests are only entered into the ledger",),
            remaining=subject.ledger.remaining,
            n_trained=subject.ledger.n_trained,
            iteration=subject.iteration,
            seconds=time.perf_counter() - preparation.started,
            unchanged=preparation.hashes,
            time=_now(),
            provenance=subject.provenance,
        )
        announce("after_unlearning", record, change)
        change.commit()
    return record


def _move(removal: Removal, parameters: Mapping[str, Tensor], change: Transaction) -> None:
    """Give parameters the values that they have without what goes."""
    moved = removal.moved
    # Every way back is noted before the first write, so that the writes can run in two threads.
    size = sum(parameters[name].nbytes for name in moved)
    held = map_two_threads(lambda name: take(parameters[name], moved[name]), moved, size)
    for name, old in zip(moved, held, strict=True):
        change.call(put, parameters[name], moved[name], old)
    map_two_threads(
        lambda name: put(parameters[name], moved[name], take(removal.values[name], moved[name])), moved, size
    )


def _replace(
    store: dict[str, Tensor] | None, new: Mapping[str, Tensor], gone: frozenset[str], change: Transaction
) -> None:
    """Put new values into those before a task in training, and drop what goes."""
    if store is None:
        return
    change.call(store.update, dict(store))
    store.update(new)
    for name in gone & set(store):
        del store[name]


def _repair(subject: Subject, preparation: Preparation, purged: list[str], change: Transaction) -> RepairSummary | None:
    """Drop the repair's samples of the tasks that go, and let it train the affected ones."""
    repair, model, tasks = subject.repair, subject.model, preparation.plan.repaired
    if repair is None:
        return None
    purged.append(repair.forget(preparation.plan.tasks, change))
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
        changed=_where(preparation.removal, dict(model.named_parameters())),
        before=subject.before,
        change=change,
    )


def _where(removal: Removal, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensor name → bool tensor of the entries that a removal changes, or that a repair which goes could move.

    Which of these it did move depends on data of tasks that may go now: nothing may follow from it.
    """
    result = {name: torch.zeros_like(removal.values[name], dtype=torch.bool) for name in removal.moved}
    for name, index in removal.moved.items():
        put(result[name], index, torch.ones_like(index, dtype=torch.bool))
    for repair in (updates for writer, updates in removal.updates.items() if writer < 0):
        for name in repair:
            noted = repair.where(name).to(parameters[name].device)
            result[name] = result[name] | noted if name in result else noted
    return result


def _hold_own(subject: Subject, change: Transaction) -> None:
    """Enter what the remaining tasks have of their own, as it is now, into the values before a task in training.

    That task puts others' own back to these values: else what a compensation or a repair wrote there would be lost.
    """
    model, before = subject.model, subject.before
    if before is None or not isinstance(model, TaskMaskedModel):
        return
    tasks = [task for task in model.tasks if task != model.current_task]
    own = frozenset().union(*(own_parameters(model, task) for task in tasks))
    change.call(before.update, {name: before[name] for name in own})
    before.update({name: p.detach().clone() for name, p in model.named_parameters() if name in own})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
