"""Computation of a model's weights without some tasks (and repairs), from undo logs; nothing is changed yet.

All writers of a tensor are undone, last one first, then replayed without the removed writers. A writer's update
``Δ`` of an entry is its written value minus the old value. If the value before a remaining writer has changed, the
writer's new value is that value plus ``Δ``, added in float64; otherwise the writer writes the same bits again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory.sparse import SparseEntries, SparseValues, positions, put, take, union_of
from avalanche_amnesia.trajectory.undo_log import UndoLog, Updates

Readers = Mapping[int, Mapping[str, Tensor]]
"""For each task, a mapping of tensor name to bool tensor: the entries that the task uses, which must not change."""


@dataclass(frozen=True)
class Revision:
    """Correction of a task after the removal of an earlier one: new values ``base · before + factor · update + added``.

    The revised update replaces the recorded one, also in later removals, even in one of the task itself.

    Attributes:
        where: bool tensor of the tensor's shape: the ``k`` revised entries.
        factor: float64 ``(k,)``, or one number for all.
        added: float64 ``(k,)``, or one number for all.
        alone: whether to drop, at these entries, updates of remaining tasks between the removed ones and this task.
        base: float64 ``(k,)``, or one number for all: factor of the value before the task; 0 if ``added`` is the
            value itself.
    """

    where: Tensor
    factor: Tensor | float = 1.0
    added: Tensor | float = 0.0
    alone: bool = False
    base: Tensor | float = 1.0

    def revised_values(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the corrected values, from the values ``before`` the task and its ``update``, float64 ``(k,)``."""
        return before * self.base + (update * self.factor + self.added)


Revisions = Mapping[int, Mapping[str, Revision]]
"""For each task that is not removed, a mapping of tensor name to the :class:`Revision` of its values."""
Step = tuple[int, SparseEntries, Tensor, Tensor, Tensor]
"""A write to a tensor: the writer (a task or repair), its log entry, flat index, values before, values written."""


def undo_writes(value: Tensor, writers: Sequence[tuple[int, SparseEntries | None]]) -> list[Step]:
    """Undo the writes of ``writers`` (tasks, repairs) to a flat tensor, in place; return the writes, last one first."""
    steps: list[Step] = []
    # The last writer is undone first, because undoing a coded log starts at the bits that its writer left.
    for task, entry in reversed(writers):
        if entry is not None:
            index = positions(entry.where)
            written = take(value, index)
            old = entry.old_values(written)
            put(value, index, old)
            steps.append((task, entry, index, old, written))
    return steps


def replay(
    name: str,
    committed: Tensor,
    writers: Sequence[tuple[int, SparseEntries | None]],
    logs: Mapping[int, UndoLog],
    updates: Mapping[int, Updates],
    reading: Mapping[int, Tensor],
    revisions: Mapping[int, Revision],
) -> tuple[Tensor, Tensor]:
    """Return a tensor without the changes of removed tasks and repairs (keys of ``updates``): undo all, redo others.

    Store the removed writers' updates in ``updates``, and the other writers' new undo entries in ``logs``. The second
    result marks entries that keep the removed writers' values, because a remaining task uses them (``reading``).
    """
    # Entries that a remaining task uses (WSN) keep the removed writers' values.
    read = torch.zeros(committed.numel() if reading else 0, dtype=torch.bool)
    for reads in reading.values():
        read |= reads
    stays = torch.zeros_like(read)
    handed: list[tuple[Tensor, Tensor]] = []
    value = committed.detach().cpu().reshape(-1).clone()
    nothing = SparseValues.select(committed, torch.zeros(committed.shape, dtype=torch.bool))
    order = [task for task, _ in writers]
    # Include a task with a revised update even if it did not write to this tensor: the revision may name other entries.
    steps = undo_writes(value, [(t, nothing if e is None and t in revisions else e) for t, e in writers])
    for task, entry, index, old, written in reversed(steps):  # forward again, without the removed writers
        if task in updates:
            kept = read[index] if reading else None
            updates[task].add(name, entry, written, kept)
            if kept is not None:
                put(value, index[kept], written[kept])
                stays[index[kept]] = True
                # Collect these entries until the end, because rebasing a reader's log starts from its old entries.
                handed.append((index[kept], old[kept]))
            continue
        update = written.double() - old.double()
        # At the entries of a later task's ``alone`` revision, this update and its undo entries are not needed.
        later = (revisions[other] for other in order[order.index(task) + 1 :] if other in revisions)
        if alone := [revision.where.reshape(-1) for revision in later if revision.alone]:
            stands = ~torch.stack(alone).any(0)
            kept = stands[index]
            if not bool(kept.all()):
                entry = logs[task][name] = entry.restrict(stands)
            index, old, written, update = index[kept], old[kept], written[kept], update[kept]
        # Compute the revision before the task's own write, because it starts from the value before that write.
        if task in revisions:
            target = positions(revisions[task].where)
            own = torch.zeros(value.numel(), dtype=torch.float64).index_copy(0, index, update)
            start = value[target]
            revised = revisions[task].revised_values(start.double(), own[target]).to(value.dtype)
        here = take(value, index)
        # If the old value has the same bits, restore the written bits, because before + Δ may round differently.
        unmoved = same_bits(here, old)
        if bool(unmoved.all()):
            put(value, index, written)
        else:
            # The old value has changed, so the log must restore the new one.
            new = torch.where(unmoved, written, (here.double() + update).to(here.dtype))
            put(value, index, new)
            logs[task][name] = entry.rebase(here, new)
        if task in revisions:
            value[target] = revised
            logs[task][name] = logs[task].get(name, nothing).extend(target, start)
    # All logs are rebased by now, so entries can be added.
    for index, old in handed:
        for task, reads in reading.items():
            taken = reads[index]
            if bool(taken.any()):
                logs[task][name] = logs[task].get(name, nothing).extend(index[taken], old[taken])
                # Only one log may restore an entry: the first reader's. Later readers get the remaining entries.
                index, old = index[~taken], old[~taken]
    return value.reshape(committed.shape), stays.reshape(committed.shape) if reading else stays


def reapply_update(current: Tensor, before: Tensor, new_before: Tensor) -> Tensor:
    """Return ``new_before + (current − before)``: values of the task in training after a change of its start values."""
    # The current task has no log yet: its update is the current value minus the start value.
    shifted = (new_before.double() + (current.detach().double() - before.double())).to(current.dtype)
    return torch.where(same_bits(current.detach(), before), new_before, shifted)


# All tensors of a removal --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ChangedEntries:
    """Entries of a tensor that a removal of tasks changes: mask ``where``, old values ``now``, new ones ``without``."""

    where: Tensor
    now: Tensor
    without: Tensor

    @classmethod
    def between(cls, now: Tensor, without: Tensor) -> ChangedEntries:
        """Return the entries whose bits differ between ``now`` and ``without``, the tensor after a removal of tasks."""
        where = ~same_bits(now, without)
        return cls(where, take(now, where.reshape(-1)), take(without, where.reshape(-1)))

    def remove_from(self, tensor: Tensor) -> None:
        """Set the changed entries of ``tensor`` to their values after the removal, in place."""
        put(tensor, self.where.reshape(-1), self.without)

    def restore_in(self, tensor: Tensor) -> None:
        """Write the changed entries' values before the removal back into ``tensor``, in place."""
        put(tensor, self.where.reshape(-1), self.now)


@dataclass(frozen=True)
class Removal:
    """Result of computing a removal of tasks, before it is applied: new weights, and new undo logs of remaining tasks.

    Attributes:
        tasks: the removed tasks.
        changed: tensor name → the changed entries.
        before: the changed entries of the values before the current task; empty between tasks.
        logs: the remaining writers' undo logs afterwards.
        shared: tensor name → bool tensor of the entries that keep the tasks' values, because remaining tasks use them.
        updates: removed task or repair → tensor name → its update ``Δ``, float64, for copies of old states (anchors).
        current: tensor name → current values.
    """

    tasks: tuple[int, ...]
    changed: Mapping[str, ChangedEntries]
    before: Mapping[str, Tensor]
    logs: Mapping[int, UndoLog]
    shared: Mapping[str, Tensor]
    updates: Mapping[int, Updates]
    current: Mapping[str, Tensor]

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Return the changed tensors' values after the removal, by name, computed at the first access."""
        result = {name: self.current[name].detach().clone() for name in self.changed}
        for name, moved in self.changed.items():
            moved.remove_from(result[name])
        return result

    def written_entries(self) -> dict[str, Tensor]:
        """Return a dict of tensor name to bool tensor, True at entries that removed tasks and repairs had changed."""
        return union_of({name: update != 0 for name, update in of.items()} for of in self.updates.values())


def compute_removal(
    tasks: Sequence[int],
    removed: Collection[int],
    recorded: Mapping[int, UndoLog],
    current: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None,
    readers: Readers | None,
    revisions: Revisions | None,
) -> Removal:
    """Implement :meth:`~avalanche_amnesia.trajectory.Trajectory.remove`: values and logs without ``removed``."""
    revisions = {} if revisions is None else revisions
    order = list(recorded)
    first = min(map(order.index, removed), default=len(order))
    later = {writer: recorded[writer] for writer in order[first:]}  # earlier logs do not depend on removed values
    logs = {  # tensors removed with the tasks (their heads) are removed from later tasks' logs too
        writer: log.with_entries({name: entry for name, entry in log.items() if name in current})
        for writer, log in recorded.items()
        if writer not in removed
    }
    changed: dict[str, ChangedEntries] = {}
    new_before: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    updates = {writer: Updates() for writer in removed}
    changing = (*(recorded[writer] for writer in removed), *revisions.values())
    names = sorted({name for tensors in changing for name in tensors if name in current})
    # Logs start at the state after the last finished task, so during a task use the values before it.
    base = {name: current[name] if before is None or name not in before else before[name] for name in names}

    def remove_from_tensor(name: str) -> tuple[ChangedEntries, Tensor | None, Tensor | None]:
        """Return a tensor's changed entries, a mask of entries kept for other tasks, and the new values if computed."""
        committed, here = base[name], base[name].detach().cpu()
        reading = {task: reads[name].cpu().reshape(-1) for task, reads in (readers or {}).items() if name in reads}
        revised = {task: of_task[name] for task, of_task in revisions.items() if name in of_task}
        bits = {writer: log[name].bits for writer, log in later.items() if name in log}
        # A revision may change entries that no removed writer changed: then consider all entries.
        going = None if revised else reduce(np.bitwise_or, (bits[writer] for writer in removed if writer in bits))
        # Replay only revised writers, and writers of an entry that may change.
        taking_part = [
            (writer, log.get(name))
            for writer, log in later.items()
            if writer in revised or (writer in bits and (going is None or (bits[writer] & going).any()))
        ]
        if len(taking_part) == 1 and not reading and not revised:  # the usual case: a single writer
            ((writer, entry),) = taking_part
            assert entry is not None
            where = entry.where
            written = take(here, where.reshape(-1))
            updates[writer].add(name, entry, written)
            change = ChangedEntries(where, written, entry.old_values(written))
            if not bool(same_bits(written, change.without).any()):
                return change, None, None
            replayed, stays = here.clone(), None
            change.remove_from(replayed)
        else:
            replayed, stays = replay(name, committed, taking_part, logs, updates, reading, revised)
        return ChangedEntries.between(here, replayed), stays, replayed

    for name in names:
        committed = base[name]
        change, stays, replayed = remove_from_tensor(name)
        if stays is not None and bool(stays.any()):
            shared[name] = stays
        if not len(change.now):
            continue
        changed[name] = ChangedEntries(*(part.to(committed.device) for part in vars(change).values()))
        if before is not None and name in before:
            if replayed is None:
                replayed = committed.detach().clone()
                changed[name].remove_from(replayed)
            new_before[name] = replayed.to(committed.device)
            # Apply the current task's update so far to its new start values.
            now = current[name].detach()
            value = reapply_update(now, before[name], new_before[name])
            changed[name] = ChangedEntries.between(now, value)
    return Removal(tuple(tasks), changed, new_before, logs, shared, updates, current)
