"""Unlearning as one operation: worked out first, then applied as a whole or not at all."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia.bits import same_bits, state_hashes
from avalanche_amnesia.models import MultiHeadModel, TaskMaskedModel
from avalanche_amnesia.unlearning.compensation import Compensation, RevisingCompensation
from avalanche_amnesia.unlearning.entries import put, take
from avalanche_amnesia.unlearning.fingerprint import Fingerprint
from avalanche_amnesia.unlearning.ledger import TaskLedger
from avalanche_amnesia.unlearning.purging import (
    PurgeContext,
    UnknownStateError,
    adapter_of,
    cleaned_anyway,
    learned_state,
)
from avalanche_amnesia.unlearning.record import (
    Claim,
    Provenance,
    RepairSummary,
    SharedEntries,
    TensorChange,
    UnlearningPlan,
    UnlearningRecord,
)
from avalanche_amnesia.unlearning.repair import Repair, carry_out, repairable
from avalanche_amnesia.unlearning.revision import combined
from avalanche_amnesia.unlearning.task_modules import own_parameters, remove_task_modules
from avalanche_amnesia.unlearning.trajectory import Log, Readers, Removal, Trajectory


@dataclass
class Subject:
    """Everything that an unlearning looks at and changes.

    Attributes:
        model: the model.
        optimizers: whose state and parameter lists are cleaned.
        trajectory: the tasks' updates.
        ledger: who may be asked for.
        plugins: the host's plugins, and the host itself, to be purged.
        compensations: what makes up to the remaining tasks.
        repair: what trains the affected tasks again afterwards; None: nothing does.
        counters: task → the host's experience counter when it was trained.
        before: values before a task that is in training, by parameter name; None between tasks. Replaced in place.
        optimized: the host's own book of optimized parameters, by name; cleaned too.
        tainted: remaining tasks whose training saw a task that was unlearned later.
        saw: the tasks that can leave a trace in a task that is in training; empty between tasks.
        exact_host: whether the training itself is reproducible from (seed, remaining tasks) alone.
        known: every task of the stream, None where that is not known.
        iteration: training iterations finished.
        in_training: the task in whose training the request fires; None between tasks.
        others: what else belongs to the host and is cleaned elsewhere: its evaluator, this package's plugins.
        provenance: for the record.
        rearrange: moves the remaining tasks' units together, once the tasks are out; None: units stay where they are.
        moved_without: from tasks that are to go to the remaining ones whose units it would move.
        opened_whole: task → layers whose mask says nothing of it, because the task opened all that it could (a pool).
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
    saw: frozenset[int] = frozenset()
    known: frozenset[int] | None = None
    iteration: int = 0
    in_training: int | None = None
    others: Sequence[object] = ()
    provenance: Provenance = field(default_factory=lambda: Provenance("unknown"))

    def in_training_without(self, tasks: Iterable[int]) -> bool:
        """Whether a task is in training in which none of these can have left a trace."""
        return self.before is not None and not self.saw & set(tasks)

    repair: Repair | None = None
    rearrange: Callable[[ExitStack], None] | None = None
    moved_without: Callable[[Sequence[int]], tuple[int, ...]] | None = None
    opened_whole: Mapping[int, Collection[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparation:
    """A checked request, worked out: the plan to show and the change to make.

    Attributes:
        plan: to show.
        removal: of the shared tensors.
        tainted: remaining tasks that will have been trained beside a task that is gone.
        started: when the work began.
        own: names of the parameters that go with the tasks.
        logs: of the trajectory, as they are before.
        fingerprint: by which an audit recognises what goes.
    """

    plan: UnlearningPlan
    removal: Removal
    tainted: frozenset[int]
    started: float
    own: frozenset[str] = field(default_factory=frozenset)
    logs: Mapping[int, Log] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None


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
    revising = (c for c in subject.compensations if isinstance(c, RevisingCompensation))
    revisions = combined(c.revise(model, trajectory, tasks) for c in revising)
    removal = trajectory.remove(tasks, shared, subject.before, readers, revisions)
    tainted = {t for t in remaining if t in subject.tainted or subject.ledger.saw(t) & set(tasks)}
    undisturbed = subject.before is None or subject.in_training_without(tasks)
    exact = subject.exact_host and not tainted and not removal.shared and undisturbed
    claim: Claim = "exact" if exact else "approximate"
    affected = _affected(model, remaining, removal, shared)
    covered = tuple(
        task for task in affected if task in revisions or any(c.covers(task, tasks) for c in subject.compensations)
    )
    plan = UnlearningPlan(
        tasks=tuple(tasks),
        event=event,
        entries={name: len(index) for name, index in sorted(removal.moved.items())},
        removed=tuple(sorted(own | _task_buffers(model, tasks))),
        affected=affected,
        compensated=covered,
        shared=_shared_entries(removal, readers),
        claim=claim,
        trajectory_bytes=sum(trajectory.nbytes(task) for task in tasks),
        purges=tuple(type(plugin).__name__ for plugin in subject.plugins if adapter_of(plugin)),
        unpurged=tuple(type(plugin).__name__ for plugin, _ in unknown_state(subject)),
        repaired=repairable(subject.repair, model, affected, tainted),
        moved=() if subject.moved_without is None else subject.moved_without(tasks),
        untelling=_untelling(model, tasks, subject.opened_whole),
    )
    return Preparation(plan, removal, frozenset(tainted), started, own, trajectory.logs)


def _untelling(model: nn.Module, tasks: Sequence[int], opened_whole: Mapping[int, Collection[str]]) -> tuple[str, ...]:
    """Names of the masks that open all that their tasks could, in every layer."""
    if not isinstance(model, TaskMaskedModel):
        return ()
    return tuple(f"_binary.{t}" for t in tasks if t in opened_whole and set(model.graph.layers) <= set(opened_whole[t]))


def unknown_state(subject: Subject) -> list[tuple[object, str]]:
    """Plugins (or the strategy) that keep something learned and have no adapter, with the path to what they keep."""
    known = [*cleaned_anyway(subject.model), *subject.optimizers, *subject.plugins, *subject.others]
    paths = ((p, learned_state(p, known)) for p in subject.plugins if adapter_of(p) is None)
    return [(plugin, path) for plugin, path in paths if path is not None]


def refuse_unknown_state(subject: Subject) -> None:
    """Raise if something keeps learned state that nobody knows how to clean.

    Raises:
        UnknownStateError: naming all of it.
    """
    unknown = unknown_state(subject)
    if unknown:
        names = ", ".join(f"{type(plugin).__name__} (in its {path})" for plugin, path in unknown)
        first = type(unknown[0][0]).__name__
        raise UnknownStateError(
            f"nothing was changed: state that was learned is kept in {names}, and nobody knows how to clean it of a "
            f"task. Write a function (plugin, context, undo) -> str under @register_purger({first}), or leave it as it "
            "is with allow_unknown=True, which the record then says (plan.unpurged)"
        )


def _task_buffers(model: nn.Module, tasks: Sequence[int]) -> frozenset[str]:
    return frozenset(model.buffer_names(tasks)) if isinstance(model, MultiHeadModel) else frozenset()


def _readers(model: nn.Module, remaining: Sequence[int]) -> Readers:
    """What the remaining tasks read, where that stays as it is whoever wrote it."""
    if not isinstance(model, TaskMaskedModel) or not model.keeps_shared_entries:
        return {}
    shapes = {name: parameter.shape for name, parameter in model.backbone.named_parameters()}
    return {
        task: {
            f"backbone.{name}": (use > 0).expand(shapes[name])
            for name, use in model.graph.parameter_use(model.masks[task]).items()
        }
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


def _affected(
    model: nn.Module, remaining: Sequence[int], removal: Removal, shared: Mapping[str, Tensor]
) -> tuple[int, ...]:
    if not removal.values:
        return ()
    if not isinstance(model, TaskMaskedModel):
        return tuple(remaining)  # without masks every task uses every entry
    changed: dict[str, Tensor] = {}
    affected: list[int] = []
    for task in remaining:
        repaired = not own_parameters(model, task).isdisjoint(removal.moved)  # by a repair that is taken out
        if repaired or task not in model.masks:  # without a mask, as stock strategies train, it uses every entry
            affected.append(task)
            continue
        for name, reads in model.graph.reads(model.masks[task]):
            index = removal.moved.get(f"backbone.{name}")
            if index is None:
                continue
            if name not in changed:
                changed[name] = _summary(index, shared[f"backbone.{name}"].shape, reads)
            if bool((changed[name] & reads).any()):
                affected.append(task)
                break
    return tuple(affected)


def _summary(index: Tensor, shape: torch.Size, reads: Tensor) -> Tensor:
    """Where a tensor has an entry at flat ``index``: only as fine as ``reads`` is, where that has one per kernel."""
    fine = len(shape) - next((d for d, size in enumerate(reversed(reads.shape)) if size > 1), reads.dim())
    if reads.shape[:fine] != shape[:fine]:
        fine = len(shape)
    summary = torch.zeros(shape[:fine].numel(), dtype=torch.bool, device=index.device)
    put(summary, index.div(shape[fine:].numel(), rounding_mode="floor"), torch.ones_like(index, dtype=torch.bool))
    return summary.reshape(*shape[:fine], *(1 for _ in shape[fine:]))


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
        before = state_hashes(subject.model.state_dict())
        order = subject.ledger.remaining
        purged = _purge_optimizers(subject, preparation, undo)
        for name, value in removal.values.items():
            index = removal.moved[name]
            undo.callback(put, parameters[name], index, take(parameters[name], index))
            put(parameters[name], index, take(value, index))
        _replace(subject.before, removal.before, preparation.own, undo)
        for task in plan.tasks:
            remove_task_modules(subject.model, task, undo)
        undo.callback(subject.trajectory.restore, subject.trajectory.logs)
        subject.trajectory.apply(removal)
        for compensation in subject.compensations:
            purged += compensation.compensate(subject.model, plan.tasks, removal, undo)
        repaired = _repair(subject, preparation, purged, undo)
        _hold_own(subject, undo)
        if subject.rearrange is not None:
            subject.rearrange(undo)
        context = PurgeContext(
            plan.tasks, order, subject.counters, preparation.own, removal, subject.model, subject.in_training
        )
        for plugin in subject.plugins:
            adapter = adapter_of(plugin)
            if adapter is not None:
                purged.append(adapter.purge(plugin, context, undo))
        undo.callback(subject.ledger.load_state_dict, subject.ledger.state_dict())
        subject.ledger.forget(plan.tasks, plan.event)
        undo.callback(subject.tainted.update, set(subject.tainted))
        undo.callback(subject.tainted.clear)
        subject.tainted.clear()
        subject.tainted.update(preparation.tainted)
        after = state_hashes(subject.model.state_dict())
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
        changed=_where(preparation.removal),
        before=subject.before,
        undo=undo,
    )


def _where(removal: Removal) -> dict[str, Tensor]:
    """Tensor name → bool tensor of the entries that a removal changes."""
    result = {name: torch.zeros_like(removal.values[name], dtype=torch.bool) for name in removal.moved}
    for name, index in removal.moved.items():
        put(result[name], index, torch.ones_like(index, dtype=torch.bool))
    return result


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
            unchanged=state_hashes(subject.model.state_dict()),
            time=_now(),
            provenance=subject.provenance,
        )
        announce("after_unlearning", record)
        undo.pop_all()
    return record


def own_modules_only(preparation: Preparation) -> Preparation:
    """The control: what the tasks have of their own goes, every entry that tasks share stays as it is."""
    removal, gone = preparation.removal, set(preparation.plan.tasks)
    logs = {task: log for task, log in preparation.logs.items() if task not in gone}
    untouched = Removal(removal.tasks, {}, {}, logs, {}, {task: {} for task in gone}, {})
    nothing: dict[str, Any] = {"entries": {}, "affected": (), "compensated": (), "repaired": (), "shared": {}}
    plan = replace(preparation.plan, claim="approximate", **nothing)
    return replace(preparation, plan=plan, removal=untouched)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _replace(store: dict[str, Tensor] | None, new: Mapping[str, Tensor], gone: frozenset[str], undo: ExitStack) -> None:
    if store is None:
        return
    undo.callback(store.update, dict(store))
    store.update(new)
    for name in gone & set(store):
        del store[name]


def _purge_optimizers(subject: Subject, preparation: Preparation, undo: ExitStack) -> list[str]:
    """Drop gradients, the parameters that go, and all optimizer state: moments mix every task that they saw.

    Only those of a task in training that saw none of the tasks stay, as far as they belong to entries that stay.
    """
    own, removal = preparation.own, preparation.removal
    keeps = subject.in_training_without(preparation.plan.tasks)
    changed = {
        id(p): ~same_bits(removal.values[name], p.detach())
        for name, p in subject.model.named_parameters()
        if keeps and name in removal.values
    }
    for parameter in subject.model.parameters():
        undo.callback(setattr, parameter, "grad", parameter.grad)
        parameter.grad = None
    gone = {id(p) for name, p in subject.model.named_parameters() if name in own}
    for optimizer in subject.optimizers:
        undo.callback(setattr, optimizer, "state", optimizer.state)
        kept = {p: entry for p, entry in optimizer.state.items() if id(p) not in gone} if keeps else {}
        optimizer.state = defaultdict(dict)
        optimizer.state.update({p: _without(entry, changed.get(id(p))) for p, entry in kept.items()})
        for group in optimizer.param_groups:
            undo.callback(group.__setitem__, "params", group["params"])
            group["params"] = [p for p in group["params"] if id(p) not in gone]
    if subject.optimized is not None:
        undo.callback(
            subject.optimized.update, {name: subject.optimized[name] for name in own & set(subject.optimized)}
        )
        for name in own:
            subject.optimized.pop(name, None)
    if not subject.optimizers:
        return []
    if keeps:
        return ["optimizer: the state of the entries that change was zeroed; the tasks' own parameters were dropped"]
    return ["optimizer: its state was dropped, with the tasks' own parameters"]


def _without(state: Mapping[str, Any], changed: Tensor | None) -> dict[str, Any]:
    """One parameter's optimizer state with zeros at some entries."""
    if changed is None:
        return dict(state)
    return {
        name: value.masked_fill(changed, 0) if isinstance(value, Tensor) and value.shape == changed.shape else value
        for name, value in state.items()
    }
