"""Plan an unlearning: compute new weights, affected tasks and the guarantee, without changing the model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from avalanche_amnesia.audit.record import SharedEntries, UnlearningPlan
from avalanche_amnesia.bits import model_hashes
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.trajectory.removal import Readers, Removal, Revision, Revisions
from avalanche_amnesia.trajectory.undo_log import Updates
from avalanche_amnesia.unlearning.claims import Claims, TamperedError
from avalanche_amnesia.unlearning.compensation import can_revise
from avalanche_amnesia.unlearning.context import UnlearningContext, own_parameters


def make_plan(context: UnlearningContext, claims: Claims, *, strict: bool = False) -> None:
    """Compute an unlearning's new weights and its plan, and store both in ``context``; the model does not change."""
    model, tasks, trajectory = context.model, context.tasks, context.trajectory
    context.hashes = model_hashes(model)
    tampered = claims.tampered_tensors(context.hashes, in_training=context.before is not None)
    if strict and tampered:
        raise TamperedError(
            f"{context.event}: tensors {sorted(tampered)} were changed by something else than trainings and "
            "unlearnings here; restore them, or leave strict out: the record then says approximate, and why"
        )
    context.own_parameters = own_parameters(model, *tasks)
    repaired = {name for repair in trajectory.repairs for name in trajectory.logs[repair] if name in context.hashes}
    context.parameters = _named_parameters(model, context.own_parameters | repaired)
    readers = _entries_to_keep(context)
    # Compensations come before the removal: later updates are then replayed, and logged, after the revised ones.
    revisions = _merge_revisions(c.revise(model, trajectory, tasks) for c in context.compensations if can_revise(c))
    shared = {name: p.detach() for name, p in context.parameters.items() if name not in context.own_parameters}
    removal = context.removal = trajectory.remove(tasks, shared, context.before, readers, revisions)
    reasons = claims.reasons(context, tampered)
    affected = _affected_tasks(context)
    compensated = (
        task for task in affected if task in revisions or any(c.covers(task, tasks) for c in context.compensations)
    )
    buffers = model.buffer_names(tasks) if isinstance(model, MultiHeadModel) else ()
    repair = context.repair
    tainted = claims.tainted_after(tasks, context.ledger)
    context.plan = UnlearningPlan(
        tasks=tasks,
        event=context.event,
        entries={name: len(removal.changed[name].now) for name in sorted(removal.changed)},
        removed=tuple(sorted(context.own_parameters.union(buffers))),
        affected=affected,
        compensated=tuple(compensated),
        shared={name: _make_shared_entries(context, name, stays) for name, stays in sorted(removal.shared.items())},
        **claims.claim_fields(context, reasons),
        trajectory_bytes=sum(trajectory.nbytes(task) for task in tasks),
        purges=tuple(type(plugin).__name__ for plugin, _ in context.purgers),
        unpurged=tuple(type(plugin).__name__ for plugin in context.unknown),
        repaired=() if repair is None else repair.repairable(model, affected, tainted),
        shared_state=tuple(sorted(context.shared_state)),
    )


def _merge_revisions(several: Iterable[Revisions]) -> Revisions:
    """Merge several plugins' revisions of recorded updates; ValueError if two plugins revise the same update."""
    result: dict[int, dict[str, Revision]] = {}
    for revisions in several:
        for task, of_task in revisions.items():
            known = result.setdefault(task, {})
            if twice := sorted(known.keys() & of_task.keys()):
                raise ValueError(
                    f"two compensations revise what task {task} wrote into {twice}; give the strategy one of them alone"
                )
            known.update(of_task)
    return result


NO_SHARED_CHANGE: Mapping[str, Any] = {"entries": {}, "affected": (), "compensated": (), "repaired": (), "shared": {}}
"""Fields of a plan that changes no shared entry."""


def limit_to_own_modules(context: UnlearningContext) -> None:
    """Limit an unlearning, as a control condition, to the tasks' own heads and norm layers; shared weights stay."""
    removed = set(context.tasks)
    logs = {task: log for task, log in context.trajectory.logs.items() if task not in removed}
    # The removal is empty: the weights stay, and so do the old states that plugins store (anchors).
    context.removal = Removal(context.tasks, {}, {}, logs, {}, {task: Updates() for task in removed}, {})
    reasons = ("obey='head': every entry that tasks share is unchanged",)
    context.plan = replace(context.plan, claim="approximate", reasons=reasons, **NO_SHARED_CHANGE)


def _named_parameters(model: nn.Module, further: Iterable[str]) -> dict[str, nn.Parameter]:
    """Return name → parameter: all registered ones, and those in ``further``: unregistered ones of finished tasks."""
    learning = dict(model.named_parameters())
    with register_all(model):
        return learning | {name: model.get_parameter(name) for name in further if name not in learning}


def _entries_to_keep(context: UnlearningContext) -> Readers:
    """Return task → parameter name → mask of entries that must not change, because this remaining task reads them."""
    # Only in WSN an unlearning does not change entries that remaining tasks read; otherwise the result is empty.
    model = context.model
    if not isinstance(model, TaskMaskedModel) or not model.keeps_shared_entries:
        return {}
    users = model.users_of(context.trajectory.moved_with(context.tasks), context.remaining)
    return {task: dict(model.entries_of(task)) for task in users}


def _make_shared_entries(context: UnlearningContext, name: str, stays: Tensor) -> SharedEntries:
    model = cast(TaskMaskedModel, context.model)  # no other model shares entries
    return SharedEntries(int(stays.sum()), model.users_of({name: stays}, context.remaining))


def _affected_tasks(context: UnlearningContext) -> tuple[int, ...]:
    model, remaining, removal = context.model, context.remaining, context.removal
    if not removal.changed:
        return ()
    if not isinstance(model, TaskMaskedModel):
        return remaining  # without masks every task uses every entry
    users = model.users_of({name: moved.where for name, moved in removal.changed.items()}, remaining)
    own = [name for name in removal.changed if not name.startswith("backbone.")]  # entries of removed repairs
    return tuple(
        task for task in remaining if task in users or (own and not own_parameters(model, task).isdisjoint(own))
    )
