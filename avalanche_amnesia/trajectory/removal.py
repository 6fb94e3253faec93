"""Removal of writers from a trajectory, worked out tensor by tensor without a change to anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import map_two_threads, same_bits
from avalanche_amnesia.trajectory.entries import differing, positions, take
from avalanche_amnesia.trajectory.merging import without_unneeded
from avalanche_amnesia.trajectory.replay import Updates, moved_along, replay
from avalanche_amnesia.trajectory.revision import Revision, Revisions
from avalanche_amnesia.trajectory.sparse import SparseEntries, chosen_by
from avalanche_amnesia.trajectory.undo_log import Log

Readers = Mapping[int, Mapping[str, Tensor]]
"""Task → tensor name → bool tensor of the entries that it reads, and that must stay as they are."""


@dataclass(frozen=True)
class Removal:
    """Result of taking tasks out of a trajectory; nothing has been changed yet.

    Attributes:
        tasks: the tasks that go.
        values: tensor name → new values, for tensors that change.
        before: the same for the values before a task that is still in training; empty between tasks.
        logs: the remaining writers' undo logs afterwards.
        shared: tensor name → bool tensor of the entries that keep what the tasks wrote, as others read them.
        updates: writer that goes, task or repair → tensor name → its update ``Δ``, float64: for copies of old states
            (an anchor, say).
        moved: tensor name → flat index of the entries at which ``values`` differ from the values now.
    """

    tasks: tuple[int, ...]
    values: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    logs: Mapping[int, Log]
    shared: Mapping[str, Tensor]
    updates: Mapping[int, Updates]
    moved: Mapping[str, Tensor]

    def written(self) -> dict[str, Tensor]:
        """Tensor name → bool tensor of the entries that the writers which go had moved."""
        result: dict[str, Tensor] = {}
        for of_task in self.updates.values():
            for name, update in of_task.items():
                result[name] = result[name] | (update != 0) if name in result else update != 0
        return result


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
    """The state without some writers; see :meth:`~avalanche_amnesia.trajectory.Trajectory.remove`.

    Args:
        tasks: tasks that go.
        gone: writers that go: the tasks, and repairs.
        recorded: all logs, in the order in which they were written.
        merged: permanent tasks whose logs were merged.
        current: tensor name → values now.
        before: values before a task in training; None between tasks.
        readers: remaining tasks for which what they read stays as it is; None: none.
        revisions: what the updates of remaining tasks become; None: they stay.
    """
    revisions = {} if revisions is None else revisions
    order = list(recorded)
    first = min(map(order.index, gone), default=len(order))
    later = {writer: recorded[writer] for writer in order[first:]}  # earlier logs stay: their values came before
    logs = {  # a tensor that goes with the tasks (their head) leaves the later tasks' logs too
        writer: log.with_entries({name: entry for name, entry in log.items() if name in current})
        for writer, log in recorded.items()
        if writer not in gone
    }
    values: dict[str, Tensor] = {}
    new_before: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    moved: dict[str, Tensor] = {}
    updates = {writer: Updates() for writer in gone}
    changing = (*(recorded[writer] for writer in gone), *revisions.values())
    names = sorted({name for tensors in changing for name in tensors if name in current})
    # Logs lead from the last finished task back, so in the middle of a task they start at the values before it.
    base = {name: current[name] if before is None or name not in before else before[name] for name in names}

    def without(name: str) -> tuple[Tensor, Tensor, Tensor]:
        """New values of a tensor, entries that stay although their writer goes, flat index of those that move."""
        committed = base[name]
        reading = {task: reads[name].cpu().reshape(-1) for task, reads in (readers or {}).items() if name in reads}
        revised = {task: of_task[name] for task, of_task in revisions.items() if name in of_task}
        # A revision may move entries that no writer who goes has touched: then no entry can be passed over.
        going = None if revised else chosen_by([recorded[writer][name] for writer in gone if name in recorded[writer]])
        taking_part = _taking_part(name, later, gone, going, revised)
        replayed, stays, steps = replay(name, committed, taking_part, logs, updates, reading, revised)
        if going is None:
            index = positions(~same_bits(replayed, committed.detach().cpu()))
        elif len(steps) == 1 and not reading:  # the usual case, without further large tensors: it alone wrote here
            _, _, index, old, written = steps[0]
            index = differing(index, old, written)
        else:
            # Only what a writer who goes had moved can have changed: the rest of the tensor is not compared.
            index = torch.from_numpy(np.flatnonzero(np.unpackbits(going, count=committed.numel()).view(bool)))
            index = differing(index, take(replayed, index), take(committed.cpu(), index))
        return replayed, stays, index

    # Whoever reads or is revised may enter tensors into logs, where their order counts.
    size = 0 if revisions or readers else sum(current[name].nbytes for name in names)
    found = map_two_threads(without, names, size)
    for name, (replayed, stays, index) in zip(names, found, strict=True):
        committed = base[name]
        if bool(stays.any()):
            shared[name] = stays
        if not len(index):
            continue
        replayed = replayed.to(committed.device)
        values[name], moved[name] = replayed, index.to(committed.device)
        if before is not None and name in before:
            new_before[name] = replayed
            # The task in training goes on from the new values before it, with its own update so far on top.
            values[name] = moved_along(current[name], before[name], replayed)
            moved[name] = positions(~same_bits(values[name], current[name].detach()))
    # Merged logs hold a way back past writers that go; without these it is not needed. Logs that stay keep their file.
    kept = {writer: log.unless_same(recorded[writer]) for writer, log in without_unneeded(logs, merged).items()}
    return Removal(tuple(tasks), values, new_before, kept, shared, updates, moved)


def _taking_part(
    name: str,
    later: Mapping[int, Log],
    gone: Collection[int],
    going: np.ndarray | None,
    revised: Mapping[int, Revision],
) -> list[tuple[int, SparseEntries | None]]:
    """Writers of a tensor that are replayed: those that wrote an entry which changes (``going``).

    Where updates are revised (``going`` is None) all who wrote take part, and those that are revised.
    """
    entries = ((writer, log.get(name)) for writer, log in later.items())
    return [
        (writer, entry)
        for writer, entry in entries
        if writer in revised
        or (entry is not None and (writer in gone or going is None or (chosen_by([entry]) & going).any()))
    ]
