"""Working an unlearning out: what goes, who is affected by it, and what may be claimed of the rest."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from avalanche_amnesia.audit.record import SharedEntries, UnlearningPlan
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.contrib.repair.carry_out import repairable
from avalanche_amnesia.contrib.residue_search.evidence import Evidence
from avalanche_amnesia.models.multi_head import MultiHeadModel, is_inside_backbone
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.tensors import parameters_of, state_of
from avalanche_amnesia.trajectory.removal import Readers, Removal
from avalanche_amnesia.trajectory.replay import Updates
from avalanche_amnesia.trajectory.revision import combined
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.unlearning.claims import Claims, TamperedError
from avalanche_amnesia.unlearning.compensation import revises
from avalanche_amnesia.unlearning.host import Host, refuse_unknown_state, unknown_state
from avalanche_amnesia.unlearning.purging.registry import purger_of
from avalanche_amnesia.unlearning.task_modules import own_parameters


@dataclass(frozen=True)
class Unlearning:
    """An unlearning that was checked and worked out, and changed nothing yet: on its way to its record."""

    host: Host
    claims: Claims
    plan: UnlearningPlan
    removal: Removal
    parameters: Mapping[str, nn.Parameter]
    own: frozenset[str]
    hashes: Mapping[str, str]
    started: float

    def evidence(self, samples: Tensor | None = None) -> Evidence:
        """Copies of what is about to be removed, by which an audit recognises it."""
        removed = [name for name in self.plan.removed if name not in self.plan.uninformative_masks]
        return Evidence.of(self.host.model, self.removal, removed, samples, self.host.opened_whole)


def prepare(
    host: Host, claims: Claims, tasks: Iterable[int], event: str, *, strict: bool = False, allow_unknown: bool = True
) -> Unlearning:
    """Check a request and work out what it would do; changes nothing."""
    started = time.perf_counter()
    tasks = host.ledger.check(tasks, event, host.known, host.unrecorded)
    model, trajectory = host.model, host.trajectory
    state = state_of(model)
    hashes = state_hashes(state)
    tampered = claims.tampered(state, hashes, in_training=host.before is not None)
    if strict and tampered:
        raise TamperedError(
            f"{event}: tensors {sorted(tampered)} were changed by something else than trainings and unlearnings here; "
            "put them back, or leave strict out: the record then says approximate, and why"
        )
    parameters = parameters_of(model)
    own = own_parameters(model, *tasks)
    shared = {name: p.detach() for name, p in parameters.items() if name not in own}
    remaining = [task for task in host.ledger.remaining if task not in tasks]
    readers = _readers(model, trajectory, tasks, remaining)
    # Revised before the removal is worked out: later updates are then replayed, and logged, behind the revised ones.
    revising = (c for c in host.compensations if revises(c))
    revisions = combined(c.revise(model, trajectory, tasks) for c in revising)
    removal = trajectory.remove(tasks, shared, host.before, readers, revisions)
    reasons = claims.reasons(host, tasks, removal, tampered)
    affected = _affected(model, remaining, removal)
    covered = tuple(
        task for task in affected if task in revisions or any(c.covers(task, tasks) for c in host.compensations)
    )
    unknown = unknown_state(host)
    if not allow_unknown:
        refuse_unknown_state(unknown)
    plan = UnlearningPlan(
        tasks=tuple(tasks),
        event=event,
        entries={name: len(removal.moved[name]) for name in sorted(removal.moved)},
        removed=tuple(sorted(own | _task_buffers(model, tasks))),
        affected=affected,
        compensated=covered,
        shared=_shared_entries(removal, readers),
        claim="approximate" if reasons else "exact",
        reasons=reasons,
        trajectory_bytes=sum(trajectory.nbytes(task) for task in tasks),
        purges=tuple(type(plugin).__name__ for plugin in host.plugins if purger_of(plugin)),
        unpurged=tuple(type(plugin).__name__ for plugin, _ in unknown),
        repaired=repairable(host.repair, model, affected, claims.tainted_without(tasks, host.ledger)),
        uninformative_masks=_uninformative_masks(model, tasks, host.opened_whole),
        shared_state=tuple(sorted(host.shared_state)),
    )
    return Unlearning(host, claims, plan, removal, parameters, own, hashes, started)


def own_modules_only(unlearning: Unlearning) -> Unlearning:
    """The control: what the tasks have of their own goes, every entry that tasks share stays as it is."""
    gone = set(unlearning.plan.tasks)
    logs = {task: log for task, log in unlearning.host.trajectory.logs.items() if task not in gone}
    # Empty all through: nothing goes out of the weights, and so nothing out of old states that plugins keep (anchors).
    untouched = Removal(unlearning.plan.tasks, {}, {}, logs, {}, {task: Updates() for task in gone}, {})
    nothing: dict[str, Any] = {"entries": {}, "affected": (), "compensated": (), "repaired": (), "shared": {}}
    reasons = ("obey='head': every entry that tasks share stays as it is",)
    plan = replace(unlearning.plan, claim="approximate", reasons=reasons, **nothing)
    return replace(unlearning, plan=plan, removal=untouched)


def _uninformative_masks(
    model: nn.Module, tasks: Sequence[int], opened_whole: Mapping[int, Collection[str]]
) -> tuple[str, ...]:
    """Names of the masks that open all that their tasks could, in every layer."""
    if not isinstance(model, TaskMaskedModel):
        return ()
    whole = (task for task in tasks if set(model.graph.layers) <= set(opened_whole.get(task, ())))
    return tuple(map(model.mask_name, whole))


def _task_buffers(model: nn.Module, tasks: Sequence[int]) -> frozenset[str]:
    return frozenset(model.buffer_names(tasks)) if isinstance(model, MultiHeadModel) else frozenset()


def _readers(model: nn.Module, trajectory: Trajectory, tasks: Sequence[int], remaining: Sequence[int]) -> Readers:
    """Entries that remaining tasks read, of those who read any that the tasks which go had moved.

    Only where what is read stays as it is, whoever wrote it (WSN); else none.
    """
    if not isinstance(model, TaskMaskedModel) or not model.keeps_shared_entries:
        return {}
    masked = frozenset(model.masked_tasks)
    users = model.users_of(trajectory.moved_with(tasks), [task for task in remaining if task in masked])
    shapes = {name: parameter.shape for name, parameter in parameters_of(model).items()}
    return {
        task: {name: reads.expand(shapes[name]) for name, reads in model.entries_of(task)}
        for task in remaining
        if task in users or task not in masked  # as stock strategies train: it uses every entry
    }


def _shared_entries(removal: Removal, readers: Readers) -> dict[str, SharedEntries]:
    return {
        name: SharedEntries(
            entries=int(stays.sum()),
            tasks=tuple(task for task, reads in readers.items() if (reads[name].cpu().numpy() & stays.numpy()).any()),
        )
        for name, stays in sorted(removal.shared.items())
    }


def _affected(model: nn.Module, remaining: Sequence[int], removal: Removal) -> tuple[int, ...]:
    if not removal.moved:
        return ()
    if not isinstance(model, TaskMaskedModel):
        return tuple(remaining)  # without masks every task uses every entry
    masked = frozenset(model.masked_tasks)
    entries = {name: moved.where for name, moved in removal.moved.items()}
    users = model.users_of(entries, [task for task in remaining if task in masked])
    own = [name for name in removal.moved if not is_inside_backbone(name)]  # by a repair that is taken out
    return tuple(
        task
        for task in remaining
        if task in users
        or task not in masked  # as stock strategies train: it uses every entry
        or (own and not own_parameters(model, task).isdisjoint(own))
    )
