"""Replay of one tensor: its writers are taken back one after the other, and replayed without those that go.

A writer's update ``Δ`` of an entry is what it wrote minus the value before it. Where the value before a remaining
writer has changed, it writes that value plus its ``Δ``, added in float64; on the same bits it writes the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory.sparse import SparseEntries, SparseValues, copied, positions, put, take
from avalanche_amnesia.trajectory.undo_log import Log, Updates


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

    @property
    def index(self) -> Tensor:
        """Flat positions of the entries, ``(k,)``."""
        return self.where.reshape(-1).nonzero()[:, 0]

    def written(self, before: Tensor, own: Tensor) -> Tensor:
        """Values after the revised task ``(k,)``, from those before it and its own update there, float64 ``(k,)``."""
        return before * self.base + (own * self.factor + self.added)


Revisions = Mapping[int, Mapping[str, Revision]]
"""Remaining task → tensor name → what its update becomes."""


def dropped_entries(order: Iterable[int], revisions: Mapping[int, Revision]) -> dict[int, Tensor]:
    """Entries of one tensor at which each task's update gives way to a later one's that is to stand alone."""
    result: dict[int, Tensor] = {}
    later: Tensor | None = None
    for task in reversed(tuple(order)):
        if later is not None:
            result[task] = later
        if task in revisions and revisions[task].alone:
            where = revisions[task].where.reshape(-1)
            later = where if later is None else torch.logical_or(later, where)
    return result


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
    dropped = dropped_entries([task for task, _ in writers], revisions)
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
        if task in dropped:
            kept = ~dropped[task][index]
            if not bool(kept.all()):
                entry = logs[task][name] = entry.restricted(~dropped[task])
            index, old, written, update = index[kept], old[kept], written[kept], update[kept]
        # Read before the task's own write: a revision replaces that write, and starts from the same value before it.
        revised = _revised(value, revisions[task], index, update) if task in revisions else None
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
        if revised is not None:
            target, start, result = revised
            value[target] = result
            logs[task][name] = logs[task].get(name, nothing).extended(target, start)
    # By now no log is made from an older one any more, so what is entered stays.
    for index, old in handed:
        _hand_over(name, index, old, reading, logs, nothing)
    return value.reshape(committed.shape), stays.reshape(committed.shape) if reading else stays


def _revised(value: Tensor, revision: Revision, index: Tensor, update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat index of the entries that a task's revision names, the values there before the task, and those after."""
    target = revision.index
    own = torch.zeros(value.numel(), dtype=torch.float64).index_copy(0, index, update)
    start = value[target]
    return target, start, revision.written(start.double(), own[target]).to(value.dtype)


def _hand_over(
    name: str,
    index: Tensor,
    values_before: Tensor,
    reading: Mapping[int, Tensor],
    logs: Mapping[int, Log],
    nothing: SparseEntries,
) -> None:
    """Enter the values before some entries into the log of the first task that reads each of them."""
    for task, reads in reading.items():
        taken = reads[index]
        if not bool(taken.any()):
            continue
        logs[task][name] = logs[task].get(name, nothing).extended(index[taken], values_before[taken])
        # One log leads back from an entry, the first reader's; the next readers get what is left.
        index, values_before = index[~taken], values_before[~taken]


def moved_along(current: Tensor, before: Tensor, new_before: Tensor) -> Tensor:
    """Values of a task in training whose starting point moves: its own update so far is kept."""
    # The task in training has no log yet: its update so far is what it holds now minus the value before it.
    shifted = (new_before.double() + (current.detach().double() - before.double())).to(current.dtype)
    return torch.where(same_bits(current.detach(), before), new_before, shifted)
