"""Removal of writers from a trajectory, worked out tensor by tensor without a change to anything.

The writers of a tensor are taken back one after the other, and replayed without those that go. A writer's update ``Δ``
of an entry is what it wrote minus the value before it. Where the value before a remaining writer has changed, it writes
that value plus its ``Δ``, added in float64; on the same bits it writes the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import as_integers, map_two_threads, same_bits
from avalanche_amnesia.trajectory.sparse import (
    SparseEntries,
    SparseValues,
    chosen_by,
    copied,
    positions,
    put,
    take,
    united,
)
from avalanche_amnesia.trajectory.undo_log import Log, Updates

Readers = Mapping[int, Mapping[str, Tensor]]
"""Task → tensor name → bool tensor of the entries that it reads, and that must stay as they are."""


@dataclass(frozen=True)
class Revision:
    """Replacement of a remaining task's update at some entries of a tensor: ``base · before + factor · own + added``.

    The task is recorded as having made the revised update: whatever is unlearned later, the task itself included, is
    taken out as if it had been so from the start.

    Attributes:
        where: bool tensor of the tensor's shape: the entries, ``k`` of them.
        factor: float64 ``(k,)``, or one number for all.
        added: float64 ``(k,)``, or one number for all.
        alone: whether what other remaining tasks wrote there, between those that go and this one, is dropped.
        base: float64 ``(k,)``, or one number for all: the share of the value before the task on which the update lies;
            0 where ``added`` is the value itself.
    """

    where: Tensor
    factor: Tensor | float = 1.0
    added: Tensor | float = 0.0
    alone: bool = False
    base: Tensor | float = 1.0

    def written(self, before: Tensor, own: Tensor) -> Tensor:
        """Values after the revised task ``(k,)``, from those before it and its own update there, float64 ``(k,)``."""
        return before * self.base + (own * self.factor + self.added)


Revisions = Mapping[int, Mapping[str, Revision]]
"""Remaining task → tensor name → what its update becomes."""
Step = tuple[int, SparseEntries, Tensor, Tensor, Tensor]
"""A write: who wrote, its entry, the flat index, the values before, the values written."""


def wind_back(value: Tensor, writers: Sequence[tuple[int, SparseEntries | None]]) -> list[Step]:
    """Take a flat tensor back, in place, to before the first of some writers, noting what each one wrote."""
    steps: list[Step] = []
    # The last writer goes first: the way back of a coded log starts at the very bits that its writer left.
    for task, entry in reversed(writers):
        if entry is not None:
            index = positions(entry.where)
            written = take(value, index)
            old = entry.before(written)
            put(value, index, old)
            steps.append((task, entry, index, old, written))
    return steps


def replay(
    name: str,
    committed: Tensor,
    writers: Sequence[tuple[int, SparseEntries | None]],
    logs: Mapping[int, Log],
    updates: Mapping[int, Updates],
    reading: Mapping[int, Tensor],
    revisions: Mapping[int, Revision],
) -> tuple[Tensor, Tensor]:
    """Values of one tensor without the writers that go (the keys of ``updates``, which receives their updates).

    Puts the remaining writers' new values before into ``logs``. The second result marks the entries that keep what
    those writers wrote, because a remaining task reads them (``reading``: task → bool ``(n,)``).
    """
    # Entries that any remaining task reads (WSN) keep what a writer that goes had put there.
    read = torch.zeros(committed.numel() if reading else 0, dtype=torch.bool)
    for reads in reading.values():
        read |= reads
    stays = torch.zeros_like(read)
    handed: list[tuple[Tensor, Tensor]] = []
    value = copied(committed)
    nothing = SparseValues.none(committed)
    order = [task for task, _ in writers]
    # A task whose update is revised takes part even if it wrote nothing here: the revision may name other entries.
    steps = wind_back(value, [(t, nothing if e is None and t in revisions else e) for t, e in writers])
    for task, entry, index, old, written in reversed(steps):  # and forward again without those that go
        if task in updates:
            kept = read[index] if reading else None
            updates[task].add(name, entry, written, kept)
            if kept is not None:
                put(value, index[kept], written[kept])
                stays[index[kept]] = True
                # Not into a log at once: a reader's log that is rebased further on is made from its old one.
                handed.append((index[kept], old[kept]))
            continue
        update = written.double() - old.double()
        # A later task's revision stands alone at these entries: neither this update nor its way back is needed there.
        later = (revisions[other] for other in order[order.index(task) + 1 :] if other in revisions)
        alone = [revision.where.reshape(-1) for revision in later if revision.alone]
        if alone:
            stands = ~torch.stack(alone).any(0)
            kept = stands[index]
            if not bool(kept.all()):
                entry = logs[task][name] = entry.restricted(stands)
            index, old, written, update = index[kept], old[kept], written[kept], update[kept]
        # Read before the task's own write: a revision replaces that write, and starts from the same value before it.
        if task in revisions:
            target = positions(revisions[task].where)
            own = torch.zeros(value.numel(), dtype=torch.float64).index_copy(0, index, update)
            start = value[target]
            revised = revisions[task].written(start.double(), own[target]).to(value.dtype)
        here = take(value, index)
        # Where the value before is the same bit for bit, the written bits are put back: before + Δ may round to others.
        unmoved = same_bits(here, old)
        if bool(unmoved.all()):
            put(value, index, written)
        else:
            # The value before has changed: the log must lead back to the new one.
            new = torch.where(unmoved, written, (here.double() + update).to(here.dtype))
            put(value, index, new)
            logs[task][name] = entry.rebased(here, new)
        if task in revisions:
            value[target] = revised
            logs[task][name] = logs[task].get(name, nothing).extended(target, start)
    # By now no log is made from an older one any more, so what is entered stays.
    for index, old in handed:
        for task, reads in reading.items():
            taken = reads[index]
            if bool(taken.any()):
                logs[task][name] = logs[task].get(name, nothing).extended(index[taken], old[taken])
                # One log leads back from an entry, the first reader's; the next readers get what is left.
                index, old = index[~taken], old[~taken]
    return value.reshape(committed.shape), stays.reshape(committed.shape) if reading else stays


def moved_along(current: Tensor, before: Tensor, new_before: Tensor) -> Tensor:
    """Values of a task in training whose starting point moves: its own update so far is kept."""
    # The task in training has no log yet: its update so far is what it holds now minus the value before it.
    shifted = (new_before.double() + (current.detach().double() - before.double())).to(current.dtype)
    return torch.where(same_bits(current.detach(), before), new_before, shifted)


# All tensors of a removal --------------------------------------------------------------------------------------------


class Moved:
    """The entries of a tensor that a removal changes.

    Attributes:
        where: bool tensor of the tensor's shape.
        now: their values ``(k,)``.
        without: their values without what goes, ``(k,)``.
    """

    def __init__(self, where: Tensor, now: Tensor, without: Tensor, index: Tensor | None = None) -> None:
        self.where, self.now, self.without = where, now, without
        self._index = positions(where) if index is None else index

    @classmethod
    def among(cls, where: Tensor, index: Tensor, now: Tensor, without: Tensor) -> Moved | None:
        """Those of some entries, at flat ``index``, whose bits change; None: none does."""
        differ = as_integers(now).numpy() != as_integers(without).numpy()
        if not differ.all():
            where.numpy().reshape(-1)[index.numpy()[~differ]] = False  # only entries of it were compared
            some = torch.from_numpy(differ)
            index, now, without = index[some], now[some], without[some]
        return cls(where, now, without, index) if len(now) else None

    def to(self, device: torch.device) -> Moved:
        """The same on a device."""
        return Moved(*(part.to(device) for part in (self.where, self.now, self.without, self._index)))

    def take_out(self, tensor: Tensor) -> None:
        """Give a tensor's entries the values without what goes, in place."""
        put(tensor, self._index, self.without)

    def put_back(self, tensor: Tensor) -> None:
        """Give them the values that they had, in place."""
        put(tensor, self._index, self.now)

    def __len__(self) -> int:
        return len(self.now)


@dataclass(frozen=True)
class Removal:
    """Result of taking tasks out of a trajectory; nothing has been changed yet.

    Attributes:
        tasks: the tasks that go.
        moved: tensor name → the entries that change, for tensors that do.
        before: the same for the values before a task that is still in training; empty between tasks.
        logs: the remaining writers' undo logs afterwards.
        shared: tensor name → bool tensor of the entries that keep what the tasks wrote, as others read them.
        updates: writer that goes, task or repair → tensor name → its update ``Δ``, float64: for copies of old states
            (an anchor, say).
        current: tensor name → values now.
    """

    tasks: tuple[int, ...]
    moved: Mapping[str, Moved]
    before: Mapping[str, Tensor]
    logs: Mapping[int, Log]
    shared: Mapping[str, Tensor]
    updates: Mapping[int, Updates]
    current: Mapping[str, Tensor]

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Tensor name → all its new values, for tensors that change; made when they are first asked for."""
        result = {name: self.current[name].detach().clone() for name in self.moved}
        for name, moved in self.moved.items():
            moved.take_out(result[name])
        return result

    def written(self) -> dict[str, Tensor]:
        """Tensor name → bool tensor of the entries that the writers which go had moved."""
        return united({name: update != 0 for name, update in of.items()} for of in self.updates.values())


def work_out(
    tasks: Sequence[int],
    gone: Collection[int],
    recorded: Mapping[int, Log],
    merged: frozenset[int],
    current: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None,
    readers: Readers | None,
    revisions: Revisions | None,
) -> Removal:
    """The state without some writers; see :meth:`~avalanche_amnesia.trajectory.Trajectory.remove`."""
    revisions = {} if revisions is None else revisions
    order = list(recorded)
    first = min(map(order.index, gone), default=len(order))
    later = {writer: recorded[writer] for writer in order[first:]}  # earlier logs stay: their values came before
    logs = {  # a tensor that goes with the tasks (their head) leaves the later tasks' logs too
        writer: log.with_entries({name: entry for name, entry in log.items() if name in current})
        for writer, log in recorded.items()
        if writer not in gone
    }
    moved: dict[str, Moved] = {}
    new_before: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    updates = {writer: Updates() for writer in gone}
    changing = (*(recorded[writer] for writer in gone), *revisions.values())
    names = sorted({name for tensors in changing for name in tensors if name in current})
    # Logs lead from the last finished task back, so in the middle of a task they start at the values before it.
    base = {name: current[name] if before is None or name not in before else before[name] for name in names}

    def without(name: str) -> tuple[Moved | None, Tensor | None, Tensor | None]:
        """Entries that move, entries that stay although their writer goes, new values where these had to be made."""
        committed = base[name]
        reading = {task: reads[name].cpu().reshape(-1) for task, reads in (readers or {}).items() if name in reads}
        revised = {task: of_task[name] for task, of_task in revisions.items() if name in of_task}
        # A revision may move entries that no writer who goes has touched: then no entry can be passed over.
        going = None if revised else chosen_by([recorded[writer][name] for writer in gone if name in recorded[writer]])
        # Replayed are those who wrote an entry that changes, or are revised.
        taking_part = [
            (writer, entry)
            for writer, entry in ((writer, log.get(name)) for writer, log in later.items())
            if writer in revised
            or (entry is not None and (writer in gone or going is None or (chosen_by([entry]) & going).any()))
        ]
        here = committed.detach().cpu()
        if going is None:
            where = torch.ones(committed.shape, dtype=torch.bool)
        else:  # only what a writer who goes had moved can have changed: the rest of the tensor is not compared
            where = torch.from_numpy(np.unpackbits(going, count=here.numel()).view(bool)).reshape(here.shape)
        index = positions(where)
        if len(taking_part) == 1 and not reading and not revised:  # the usual case: only it wrote here
            ((writer, entry),) = taking_part
            assert entry is not None
            written = take(here, index)
            updates[writer].add(name, entry, written)
            return Moved.among(where, index, written, entry.before(written)), None, None
        replayed, stays = replay(name, committed, taking_part, logs, updates, reading, revised)
        return Moved.among(where, index, take(here, index), take(replayed, index)), stays, replayed

    # Whoever reads or is revised may enter tensors into logs, where their order counts.
    size = 0 if revisions or readers else sum(current[name].nbytes for name in names)
    for name, (change, stays, replayed) in zip(names, map_two_threads(without, names, size), strict=True):
        committed = base[name]
        if stays is not None and bool(stays.any()):
            shared[name] = stays
        if change is None:
            continue
        moved[name] = change.to(committed.device)
        if before is not None and name in before:
            if replayed is None:
                replayed = committed.detach().clone()
                moved[name].take_out(replayed)
            new_before[name] = replayed.to(committed.device)
            # The task in training goes on from the new values before it, with its own update so far on top.
            now = current[name].detach()
            value = moved_along(now, before[name], new_before[name])
            where = ~same_bits(value, now)
            moved[name] = Moved(where, take(now, positions(where)), take(value, positions(where)))
    # Merged logs hold a way back past writers that go; without these it is not needed. Logs that stay keep their file.
    kept = {writer: log.unless_same(recorded[writer]) for writer, log in without_unneeded(logs, merged).items()}
    return Removal(tuple(tasks), moved, new_before, kept, shared, updates, current)


def without_unneeded(logs: Mapping[int, Log], merged: frozenset[int]) -> dict[int, Log]:
    """Logs of which those of merged tasks hold only what taking others out needs.

    A merged task's entry is needed where an earlier task that may go wrote it too: the way back there leads over it.
    Of several merged writers with no such task's write between them the first one's value before is enough, unless the
    way back to it starts at what itself had written.
    """
    if not merged:
        return dict(logs)
    result = {task: log.with_entries(log) for task, log in logs.items()}
    for name in {name for task in merged & set(logs) for name in logs[task]}:
        wrote: Tensor | None = None
        for task, log in result.items():
            if name not in log:
                continue
            where = log[name].where.reshape(-1)
            # Entries that a task which may go has written, and those of them for which a way back is kept already.
            if wrote is None:
                wrote, held = torch.zeros_like(where), torch.zeros_like(where)
            if task not in merged:
                wrote, held = wrote | where, held & ~where
                continue
            needed = where & wrote & ~held
            if not log[name].follows_value:
                held = held | needed
            if not bool(needed.any()):
                del log[name]
            elif not torch.equal(needed, where):
                log[name] = log[name].restricted(needed)
    return {task: log.unless_same(logs[task]) for task, log in result.items()}
