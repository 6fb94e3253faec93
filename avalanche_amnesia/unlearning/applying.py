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
from avalanche_amnesia.contrib.repair.carry_out import carry_out
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.tensors import parameters_of, state_of
from avalanche_amnesia.trajectory.entries import fill
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.host import Host
from avalanche_amnesia.unlearning.optimizer_state import purge_optimizer
from avalanche_amnesia.unlearning.planning import Unlearning
from avalanche_amnesia.unlearning.purging.registry import PurgeContext, purger_of
from avalanche_amnesia.unlearning.task_modules import own_parameters, remove_task_modules

Announce = Callable[[str, UnlearningRecord | None, Transaction], None]


@torch.no_grad()
def apply(unlearning: Unlearning, announce: Announce, *, fingerprint: bool = False) -> UnlearningRecord:
    """Carry an unlearning out as a whole; any exception leaves everything as it was."""
    host, plan, removal = unlearning.host, unlearning.plan, unlearning.removal
    model, before = host.model, unlearning.hashes
    evidence = unlearning.evidence().fingerprint() if fingerprint else None
    parameters = unlearning.parameters
    with Transaction() as change:
        announce("before_unlearning", None, change)
        # With the tasks that go still in them: purgers tell by it which stored states knew them.
        order, logs = host.ledger.remaining, host.trajectory.logs
        # First: it finds the tasks' own parameters, and the entries that change, in the model as it still is.
        purged = [purge_optimizer(unlearning, change)]
        purgers = [(plugin, purge) for plugin in host.plugins if (purge := purger_of(plugin)) is not None]
        if purgers:
            dict(removal.values)  # made now: a purger asks for them when the model has changed
        _move(removal, parameters, change)
        _replace(host.before, removal.before, unlearning.own, change)
        for task in plan.tasks:
            remove_task_modules(model, task, change)
        change.call(host.trajectory.restore, logs)
        host.trajectory.apply(removal)
        # Compensations and repairs build on a model and a trajectory without the tasks.
        for compensation in host.compensations:
            purged += compensation.compensate(model, plan.tasks, removal, change)
        repaired = _repair(unlearning, purged, change)
        _hold_own(host, change)
        if host.masking is not None:
            left = {task: layers for task, layers in host.opened_whole.items() if task not in plan.tasks}
            change.set(host.masking, opened_whole=left)
        context = PurgeContext(
            tasks=plan.tasks,
            order=order,
            writers=tuple(logs),
            counters=host.counters,
            own_parameters=unlearning.own,
            removal=removal,
            model=model,
            in_training=host.in_training,
        )
        purged += [purge(plugin, context, change) for plugin, purge in purgers]
        _forget(unlearning, change)
        after = state_hashes(state_of(model))
        unlearning.claims.unlearned(host, plan.tasks, after, change)
        record = UnlearningRecord(
            plan=plan,
            changes=tuple(
                TensorChange(name, before.get(name), after.get(name))
                for name in sorted({*before, *after})
                if before.get(name) != after.get(name)
            ),
            unchanged={name: digest for name, digest in after.items() if before.get(name) == digest},
            purged=tuple(purged),
            fingerprint=evidence,
            repair=repaired,
            **_stamp(unlearning),
        )
        announce("after_unlearning", record, change)
        # Old log files are deleted last, when all else has succeeded; a failure here can still be taken back.
        host.trajectory.settle()
        change.commit()
    return record


def ledger_only(unlearning: Unlearning, announce: Announce) -> UnlearningRecord:
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
    plan = replace(unlearning.plan, claim="approximate", reasons=reasons, **nothing)
    with Transaction() as change:
        announce("before_unlearning", None, change)
        _forget(unlearning, change)
        record = UnlearningRecord(
            plan=plan,
            changes=(),
            unchanged=unlearning.hashes,
            purged=("nothing: requests are only entered into the ledger",),
            **_stamp(unlearning),
        )
        announce("after_unlearning", record, change)
        change.commit()
    return record


def _forget(unlearning: Unlearning, change: Transaction) -> None:
    """Enter the request into the ledger."""
    ledger, plan = unlearning.host.ledger, unlearning.plan
    change.call(ledger.way_back())
    ledger.forget(plan.tasks, plan.event)


def _stamp(unlearning: Unlearning) -> dict[str, Any]:
    """Time, duration and model of a record, as its arguments."""
    host = unlearning.host
    return {
        "remaining": host.ledger.remaining,
        "n_trained": host.ledger.n_trained,
        "iteration": host.strategy.clock.train_iterations,
        "seconds": time.perf_counter() - unlearning.started,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "provenance": host.provenance,
    }


def _move(removal: Removal, parameters: Mapping[str, Tensor], change: Transaction) -> None:
    """Give parameters the values that they have without what goes."""
    # Every way back is noted before the first write, so that the writes can run in two threads.
    for name, moved in removal.moved.items():
        change.call(fill, parameters[name], moved.where, moved.now)
    size = sum(parameters[name].nbytes for name in removal.moved)
    map_two_threads(
        lambda name: fill(parameters[name], removal.moved[name].where, removal.moved[name].without),
        removal.moved,
        size,
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


def _repair(unlearning: Unlearning, purged: list[str], change: Transaction) -> RepairSummary | None:
    """Drop the repair's samples of the tasks that go, and let it train the affected ones."""
    host, plan, model = unlearning.host, unlearning.plan, unlearning.host.model
    if host.repair is None:
        return None
    purged.append(host.repair.forget(plan.tasks, change))
    if not plan.repaired or not isinstance(model, TaskMaskedModel):
        return None
    return carry_out(
        host.repair,
        model,
        host.optimizer,
        host.trajectory,
        tasks=plan.repaired,
        compensated=plan.compensated,
        changed=_where(unlearning.removal, unlearning.parameters),
        before=host.before,
        change=change,
    )


def _where(removal: Removal, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensor name → bool tensor of the entries that a removal changes, or that a repair which goes could move.

    Which of these it did move depends on data of tasks that may go now: nothing may follow from it.
    """
    result = {name: moved.where for name, moved in removal.moved.items()}
    for repair in (updates for writer, updates in removal.updates.items() if writer < 0):
        for name in repair:
            noted = repair.where(name).to(parameters[name].device)
            result[name] = result[name] | noted if name in result else noted
    return result


def _hold_own(host: Host, change: Transaction) -> None:
    """Enter what the remaining tasks have of their own, as it is now, into the values before a task in training.

    That task puts others' own back to these values: else what a compensation or a repair wrote there would be lost.
    """
    model, before = host.model, host.before
    if before is None or not isinstance(model, TaskMaskedModel):
        return
    tasks = [task for task in model.tasks if task != model.current_task]
    own = own_parameters(model, *tasks)
    change.call(before.update, {name: before[name] for name in own})
    before.update({name: p.detach().clone() for name, p in parameters_of(model).items() if name in own})
