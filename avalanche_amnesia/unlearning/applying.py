"""Carrying an unlearning out, as a whole or not at all."""

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.audit.record import (
    NOT_OBEYED,
    Provenance,
    RepairSummary,
    TensorChange,
    UnlearningPlan,
    UnlearningRecord,
)
from avalanche_amnesia.bits import map_two_threads, state_hashes
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.trajectory.sparse import united
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.claims import Claims
from avalanche_amnesia.unlearning.context import UnlearningContext, own_parameters, remove_task_modules
from avalanche_amnesia.unlearning.planning import NOTHING_SHARED

Announce = Callable[[str, UnlearningRecord | None, Transaction], None]
TrainAgain = Callable[[UnlearningContext, Transaction], UnlearningPlan]


@torch.no_grad()
def apply(
    context: UnlearningContext,
    claims: Claims,
    announce: Announce,
    provenance: Provenance,
    train_again: TrainAgain | None = None,
) -> UnlearningRecord:
    """Carry an unlearning out as a whole; any exception leaves everything as it was.

    ``train_again`` trains a task that goes again, without some samples, so that it remains; it returns the plan as it
    came out.
    """
    model, removal = context.model, context.removal
    with Transaction() as change:
        announce("before_unlearning", None, change)
        # First: it finds the tasks' own parameters, and the entries that change, in the model as it still is.
        purged = [_purge_optimizer(context, claims, change)]
        if context.purgers:
            dict(removal.values)  # made now: a purger asks for them when the model has changed
        _move(removal, context.parameters, change)
        if context.before is not None:  # the tasks go out of the values before a task in training, too
            change.call(context.before.update, dict(context.before))
            context.before.update(removal.before)
            for name in context.own_parameters & set(context.before):
                del context.before[name]
        for task in context.tasks:
            remove_task_modules(model, task, change)
        change.call(context.trajectory.restore, context.trajectory.logs)
        context.trajectory.apply(removal)
        # Compensations and repairs build on a model and a trajectory without the tasks.
        for compensation in context.compensations:
            purged += compensation.compensate(model, context.tasks, removal, change)
        repaired = _repair(context, purged, change)
        _hold_own(context, change)
        for plugin, purge in context.purgers:
            with naming_whose(context.strategy, "", plugin):
                line: Any = purge(plugin, context, change)
                if not isinstance(line, str):
                    raise TypeError(f"it returned {line!r}, and must return a line for the record: what it has cleaned")
                purged.append(line)
        if train_again is None:
            _forget(context, change)
        after = state_hashes(model.state_dict(keep_vars=True))
        claims.unlearned(context, after, change)
        if train_again is not None:
            context.plan = train_again(context, change)
            after = state_hashes(model.state_dict(keep_vars=True))
        record = _record(context, provenance, after, purged, repaired)
        announce("after_unlearning", record, change)
        # Old log files are deleted last, when all else has succeeded; a failure here can still be taken back.
        context.trajectory.settle()
        change.commit()
    return record


def ledger_only(context: UnlearningContext, announce: Announce, provenance: Provenance) -> UnlearningRecord:
    """Enter the request into the ledger and announce it, and leave everything as it is: a control."""
    nothing = {**NOTHING_SHARED, "removed": (), "trajectory_bytes": 0}
    context.plan = replace(context.plan, claim="approximate", reasons=(NOT_OBEYED,), **nothing)
    with Transaction() as change:
        announce("before_unlearning", None, change)
        _forget(context, change)
        purged = ["nothing: requests are only entered into the ledger"]
        record = _record(context, provenance, context.hashes, purged)
        announce("after_unlearning", record, change)
        change.commit()
    return record


def _forget(context: UnlearningContext, change: Transaction) -> None:
    """Enter the request into the ledger."""
    change.keep(context.ledger, *vars(context.ledger))
    context.ledger.forget(context.tasks, context.event)


def _record(
    context: UnlearningContext,
    provenance: Provenance,
    after: Mapping[str, str],
    purged: Sequence[str],
    repair: RepairSummary | None = None,
) -> UnlearningRecord:
    before, names = context.hashes, sorted({*context.hashes, *after})
    changed = [name for name in names if before.get(name) != after.get(name)]
    return UnlearningRecord(
        plan=context.plan,
        changes=tuple(TensorChange(name, before.get(name), after.get(name)) for name in changed),
        unchanged={name: digest for name, digest in after.items() if before.get(name) == digest},
        purged=tuple(purged),
        remaining=context.ledger.remaining,
        n_trained=context.ledger.n_trained,
        iteration=context.strategy.clock.train_iterations,
        seconds=time.perf_counter() - context.started,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=provenance,
        repair=repair,
    )


def _purge_optimizer(context: UnlearningContext, claims: Claims, change: Transaction) -> str:
    """Drop gradients, the parameters that go, and all optimizer state: moments mix every task that they saw."""
    # Only those of a task in training that saw none of the tasks stay, as far as they belong to entries that stay.
    own, removal = context.own_parameters, context.removal
    parameters, optimizer = context.parameters, context.strategy.optimizer
    keeps = context.before is not None and not claims.influences & set(context.tasks)
    changed = {id(parameters[name]): moved.where for name, moved in removal.moved.items()} if keeps else {}
    for parameter in parameters.values():
        if parameter.grad is not None:
            change.set(parameter, grad=None)
    gone = {id(parameters[name]) for name in own}
    kept = {p: entry for p, entry in optimizer.state.items() if id(p) not in gone} if keeps else {}
    change.set(optimizer, state=defaultdict(dict))
    optimizer.state.update({p: _zeroed(entry, changed.get(id(p))) for p, entry in kept.items()})
    for group in optimizer.param_groups:
        change.call(group.__setitem__, "params", group["params"])
        group["params"] = [p for p in group["params"] if id(p) not in gone]
    optimized = getattr(context.strategy, "optimized_param_id", None)  # the host's own table of them, by name
    if optimized is not None:
        change.call(optimized.update, {name: optimized[name] for name in own & set(optimized)})
        for name in own:
            optimized.pop(name, None)
    if keeps:
        return "optimizer: the state of the entries that change was zeroed; the tasks' own parameters were dropped"
    return "optimizer: its state was dropped, with the tasks' own parameters"


def _zeroed(state: Mapping[str, Any], changed: Tensor | None) -> dict[str, Any]:
    """One parameter's optimizer state with zeros at some entries."""
    if changed is None:
        return dict(state)
    return {
        name: value.masked_fill(changed, 0) if isinstance(value, Tensor) and value.shape == changed.shape else value
        for name, value in state.items()
    }


def _move(removal: Removal, parameters: Mapping[str, Tensor], change: Transaction) -> None:
    """Give parameters the values that they have without what goes."""
    # Every way back is noted before the first write, so that the writes can run in two threads.
    for name, moved in removal.moved.items():
        change.call(moved.put_back, parameters[name])
    size = sum(parameters[name].nbytes for name in removal.moved)
    map_two_threads(
        lambda name: removal.moved[name].take_out(parameters[name]),
        removal.moved,
        size,
    )


def _repair(context: UnlearningContext, purged: list[str], change: Transaction) -> RepairSummary | None:
    """Drop the repair's samples of the tasks that go, and let it train the affected ones."""
    repair, plan = context.repair, context.plan
    if repair is None:
        return None
    purged.append(repair.forget(context.tasks, change))
    if not plan.repaired:
        return None
    return repair.carry_out(
        context.model,
        context.strategy.optimizer,
        context.trajectory,
        tasks=plan.repaired,
        compensated=plan.compensated,
        changed=_where(context.removal, context.parameters),
        before=context.before,
        change=change,
    )


def _where(removal: Removal, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensor name → bool tensor of the entries that a removal changes, or that a repair which goes could move."""
    # Which of these it did move depends on data of tasks that may go now: nothing may follow from it.
    changed = {name: moved.where for name, moved in removal.moved.items()}
    repairs = [updates for writer, updates in removal.updates.items() if writer < 0]
    return united([changed, *({name: of.where(name).to(parameters[name].device) for name in of} for of in repairs)])


def _hold_own(context: UnlearningContext, change: Transaction) -> None:
    """Enter what unfinished tasks have of their own, as it is now, into the values before a task in training."""
    # That task puts others' own back to these: else what a compensation or a repair wrote there would be lost.
    model, before = context.model, context.before
    if before is None or not isinstance(model, TaskMaskedModel):
        return
    own = own_parameters(model, *(task for task in model.unfinished if task != model.current_task))
    change.call(before.update, {name: before[name] for name in own})
    before.update({name: p.detach().clone() for name, p in model.named_parameters() if name in own})


# Code of others that an unlearning calls ------------------------------------------------------------------------------


class BrokenPluginError(RuntimeError):
    """A plugin, metric, logger or purger failed; nothing has changed when it is raised. Its cause is the error."""


# No RequestError: a request of the stream that met one is answered, and this one is to be obeyed once it can be.
@contextmanager
def naming_whose(strategy: Strategy, event: str, purged: object = None) -> Iterator[None]:
    """Say of an error whose it is: of what is being purged, or of the last one called that listens to an event."""
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # whatever the code of others raises
        evaluator = strategy.evaluator
        places = [("plugins", [plugin for plugin in strategy.plugins if plugin is not evaluator])]
        places += [("evaluator.metrics", evaluator.metrics), ("evaluator.loggers", evaluator.loggers)]
        place_of = {id(thing): place for place, things in places for thing in things}
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_argcount]
        called = [frame.f_locals.get(frame.f_code.co_varnames[0]) for frame in frames]
        thing = purged or next((one for one in reversed(called) if id(one) in place_of), None)
        if thing is None or (purged is None and type(thing).__module__.startswith("avalanche_amnesia.")):
            raise  # what is wrong is said by this package's own
        kind, place = type(thing).__name__, place_of.get(id(thing))
        code, mend = f"{kind}.{event}", "Mend it"
        if purged is not None:
            code, mend = f"the purger of {kind}", f"Mend it and register it again (@register_purger({kind}))"
        raise BrokenPluginError(
            f"{code} failed ({type(error).__name__}: {error}). Nothing was changed, and the same can be asked again. "
            + (mend if place is None else f"{mend}, or go on without it: take it out of strategy.{place}")
        ) from error
