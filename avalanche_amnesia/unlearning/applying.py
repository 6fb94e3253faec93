"""Apply a planned unlearning, completely or not at all."""

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
from avalanche_amnesia.bits import model_hashes
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.processes import check_equal, from_first
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.trajectory.sparse import union_of
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.claims import Claims
from avalanche_amnesia.unlearning.context import UnlearningContext, own_parameters, remove_task_modules
from avalanche_amnesia.unlearning.planning import NO_SHARED_CHANGE

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
    """Apply a planned unlearning and return its record; any exception restores the state before the unlearning.

    ``train_again`` retrains the task without some samples, so that it remains; it returns the final plan.
    """
    model, removal = context.model, context.removal
    with Transaction() as change:
        announce("before_unlearning", None, change)
        # The optimizer comes first, because it needs the tasks' own parameters, which are still in the model.
        purged = [_purge_optimizer(context, claims, change)]
        if context.purgers:
            dict(removal.values)  # computed now, because purgers read them after the model has changed
        for name, moved in removal.changed.items():  # the values without the unlearned tasks
            change.call(moved.restore_in, context.parameters[name])
            moved.remove_from(context.parameters[name])
        if context.before is not None:  # remove the tasks from the values before the current task, too
            change.call(context.before.update, dict(context.before))
            context.before.update(removal.before)
            for name in context.own_parameters & set(context.before):
                del context.before[name]
        for task in context.tasks:
            remove_task_modules(model, task, change)
        change.keep(context.trajectory, "logs")
        context.trajectory.apply(removal)
        # Compensations and repairs build on a model and a trajectory without the tasks.
        for compensation in context.compensations:
            purged += compensation.compensate(model, context.tasks, removal, change)
        repaired = _run_repair(context, purged, change)
        _update_snapshot(context, change)
        for plugin, purge in context.purgers:
            with name_broken_plugin(context.strategy, "", plugin):
                line: Any = purge(plugin, context, change)
                if not isinstance(line, str):
                    raise TypeError(f"it returned {line!r}, and must return a line for the record: what it has cleaned")
                purged.append(line)
        if train_again is None:
            _mark_unlearned(context, change)
        # In an additive model only sums of these tasks change; the next request finds any other change.
        own = tuple(f"heads.{task}." for task in context.tasks)
        additive = getattr(model, "additive", False)
        same = {name for name in context.hashes if additive and not name.startswith(own)}
        if not (train_again or context.has_listeners or context.purgers or context.compensations or context.repair):
            touched = {*removal.changed, *context.own_parameters}  # nothing else was written
            same |= {n for n in context.hashes if n.startswith(("backbone.", "heads.")) and n not in touched}
        # A training compares the model with its last hashes; a subtraction of samples does not.
        after = context.hashes if train_again and additive else model_hashes(model, same)
        claims.record_unlearning(context, after, change)
        if train_again is not None:
            context.plan = train_again(context, change)
            after = model_hashes(model, same)
            change.set(claims, _hashes=dict(after))
        record = _make_record(context, provenance, after, purged, repaired)
        announce("after_unlearning", record, change)
        change.commit()
    return record


def apply_to_ledger_only(context: UnlearningContext, announce: Announce, provenance: Provenance) -> UnlearningRecord:
    """Mark tasks as unlearned in the ledger (list of tasks) and trigger the events; change no weight (a control)."""
    nothing = {**NO_SHARED_CHANGE, "removed": (), "trajectory_bytes": 0}
    context.plan = replace(context.plan, claim="approximate", reasons=(NOT_OBEYED,), **nothing)
    with Transaction() as change:
        announce("before_unlearning", None, change)
        _mark_unlearned(context, change)
        purged = ["nothing: requests are only entered into the ledger"]
        record = _make_record(context, provenance, context.hashes, purged)
        announce("after_unlearning", record, change)
        change.commit()
    return record


def _mark_unlearned(context: UnlearningContext, change: Transaction) -> None:
    """Mark the tasks as unlearned in the ledger (list of all tasks), undoable by ``change``."""
    change.keep(context.ledger, *vars(context.ledger))
    context.ledger.forget(context.tasks, context.event)


def _make_record(
    context: UnlearningContext,
    provenance: Provenance,
    after: Mapping[str, str],
    purged: Sequence[str],
    repair: RepairSummary | None = None,
) -> UnlearningRecord:
    before, names = context.hashes, sorted({*context.hashes, *after})
    changed = [name for name in names if before.get(name) != after.get(name)]
    check_equal({f"tensor {name}": digest for name, digest in after.items()}, f"{context.event}, unlearned,")
    seconds, at = from_first((time.perf_counter() - context.started, datetime.now(UTC).isoformat(timespec="seconds")))
    return UnlearningRecord(
        plan=context.plan,
        changes=tuple(TensorChange(name, before.get(name), after.get(name)) for name in changed),
        unchanged={name: digest for name, digest in after.items() if before.get(name) == digest},
        purged=tuple(purged),
        remaining=context.ledger.remaining,
        n_trained=context.ledger.n_trained,
        iteration=context.strategy.clock.train_iterations,
        seconds=seconds,
        time=at,
        provenance=provenance,
        repair=repair,
    )


def _purge_optimizer(context: UnlearningContext, claims: Claims, change: Transaction) -> str:
    """Clean the optimizer: drop gradients, unlearned tasks' parameters, and state that these tasks may have changed."""
    # Moments of the current task stay if it could not see an unlearned task, except those of changed entries.
    own, removal = context.own_parameters, context.removal
    parameters, optimizer = context.parameters, context.strategy.optimizer
    keeps = context.before is not None and not claims.influences & set(context.tasks)
    changed = {id(parameters[name]): moved.where for name, moved in removal.changed.items()} if keeps else {}
    for parameter in parameters.values():
        if parameter.grad is not None:
            change.set(parameter, grad=None)
    optimized = getattr(context.strategy, "optimized_param_id", None) or {}  # Avalanche's own table of parameters
    # A task's end may have replaced its parameters, which the optimizer drops only after the training.
    removed_ids = {id(table[name]) for table in (parameters, optimized) for name in own if name in table}
    kept = {p: entry for p, entry in optimizer.state.items() if id(p) not in removed_ids} if keeps else {}
    change.set(optimizer, state=defaultdict(dict))
    optimizer.state.update({p: _zero_entries(entry, changed.get(id(p))) for p, entry in kept.items()})
    for group in optimizer.param_groups:
        change.call(group.__setitem__, "params", group["params"])
        group["params"] = [p for p in group["params"] if id(p) not in removed_ids]
    change.call(optimized.update, {name: optimized[name] for name in own & set(optimized)})
    for name in own:
        optimized.pop(name, None)
    if keeps:
        return "optimizer: the state of the entries that change was zeroed; the tasks' own parameters were dropped"
    return "optimizer: its state was dropped, with the tasks' own parameters"


def _zero_entries(state: Mapping[str, Any], changed: Tensor | None) -> dict[str, Any]:
    """Return one parameter's optimizer state, such as Adam's moments, with zeros where ``changed`` is True."""
    if changed is None:
        return dict(state)
    return {
        name: value.masked_fill(changed, 0) if isinstance(value, Tensor) and value.shape == changed.shape else value
        for name, value in state.items()
    }


def _run_repair(context: UnlearningContext, purged: list[str], change: Transaction) -> RepairSummary | None:
    """Let the repair plugin delete unlearned tasks' samples, and train affected tasks on their stored samples."""
    repair, plan = context.repair, context.plan
    if repair is None:
        return None
    purged.append(repair.forget(context.tasks, change))
    if not plan.repaired:
        return None
    changed = {name: moved.where for name, moved in context.removal.changed.items()}
    # The entries that a removed repair did move depend on data of unlearned tasks, so nothing may be derived from them.
    removed, parameters = context.removal.updates, context.parameters
    could_change = [{n: removed[w].where(n).to(parameters[n].device) for n in removed[w]} for w in removed if w < 0]
    return repair.carry_out(
        context.model,
        context.strategy.optimizer,
        context.trajectory,
        tasks=plan.repaired,
        compensated=plan.compensated,
        changed=union_of([changed, *could_change]),
        before=context.before,
        change=change,
    )


def _update_snapshot(context: UnlearningContext, change: Transaction) -> None:
    """Update the snapshot ``context.before`` with the current heads and norms of tasks that have no mask."""
    # The task in training restores these values at its end: without the copy, compensations and repairs would be lost.
    model, before = context.model, context.before
    if before is None or not isinstance(model, TaskMaskedModel):
        return
    own = own_parameters(model, *(task for task in model.unfinished if task != model.current_task))
    change.call(before.update, {name: before[name] for name in own})
    before.update({name: p.detach().clone() for name, p in model.named_parameters() if name in own})


class BrokenPluginError(RuntimeError):
    """Error of a plugin, metric, logger or purger (function that cleans a plugin). Nothing was changed."""


# Not a RequestError, because a stream's request counts as answered after a RequestError, but stays open after this.
@contextmanager
def name_broken_plugin(strategy: Strategy, event: str, purged: object = None) -> Iterator[None]:
    """In a ``with`` block, convert an error of a plugin, metric, logger or purger to a BrokenPluginError naming it."""
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # any error of a user's code
        evaluator = strategy.evaluator
        places = [("plugins", [plugin for plugin in strategy.plugins if plugin is not evaluator])]
        places += [("evaluator.metrics", evaluator.metrics), ("evaluator.loggers", evaluator.loggers)]
        place_of = {id(obj): place for place, objects in places for obj in objects}
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_argcount]
        called = [frame.f_locals.get(frame.f_code.co_varnames[0]) for frame in frames]
        obj = purged or next((one for one in reversed(called) if id(one) in place_of), None)
        if obj is None or (purged is None and type(obj).__module__.startswith("avalanche_amnesia.")):
            raise  # errors of this package already name their source
        kind, place = type(obj).__name__, place_of.get(id(obj))
        code, mend = f"{kind}.{event}", "Mend it"
        if purged is not None:
            code, mend = f"the purger of {kind}", f"Mend it and register it again (@register_purger({kind}))"
        raise BrokenPluginError(
            f"{code} failed ({type(error).__name__}: {error}). Nothing was changed, and the same can be asked again. "
            + (mend if place is None else f"{mend}, or go on without it: take it out of strategy.{place}")
        ) from error
