"""What every task changed, kept so that it can be taken out again (METHOD §6).

The store is an undo log: per task and tensor, the values *before* the task of the entries that the task moved. The
update ``Δ`` of a task at an entry is the value before the next writer minus its own. Taking tasks out replays the
remaining writers of each entry on top of the value before the first one that goes:

* an entry that only they wrote gets its initial value back, bit for bit;
* an entry that they wrote last gets the bits before them;
* an entry that others wrote later loses their update, subtracted in float64.

The update of a repair lies among them, as if it were a task: it goes with whatever goes next.

Economies (:class:`~avalanche_amnesia.unlearning.fidelity.Fidelity`) change what a task leaves in the model, never what
its log gives back: all of the above holds with each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.unlearning.entries import copied, differing, positions, put, take
from avalanche_amnesia.unlearning.fidelity import Fidelity
from avalanche_amnesia.unlearning.log import Log, report
from avalanche_amnesia.unlearning.log_files import LogDirectory, TrajectoryError, read_logs, write_logs
from avalanche_amnesia.unlearning.revision import Revision, Revisions, dropped_entries
from avalanche_amnesia.unlearning.sparse import SparseEntries, SparseValues, chosen_by

Readers = Mapping[int, Mapping[str, Tensor]]
"""Task → tensor name → bool tensor of the entries that it reads, and that must stay as they are."""

REPAIR = -(2**31)
"""No task's label: the key of the update of a repair among the logs."""


@dataclass(frozen=True)
class Removal:
    """What taking tasks out of a trajectory leads to; nothing has been changed yet.

    Attributes:
        tasks: the tasks that go.
        values: tensor name → new values, for tensors that change.
        before: the same for the values before a task that is still in training; empty between tasks.
        logs: the remaining tasks' undo logs afterwards.
        shared: tensor name → bool tensor of the entries that keep what the tasks wrote, as others read them.
        updates: task that goes (:data:`REPAIR` for a repair) → tensor name → its update ``Δ``, float64: for copies of
            old states (an anchor, say).
        moved: tensor name → flat index of the entries at which ``values`` differ from the values now.
    """

    tasks: tuple[int, ...]
    values: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    logs: Mapping[int, Log]
    shared: Mapping[str, Tensor]
    updates: Mapping[int, Mapping[str, Tensor]]
    moved: Mapping[str, Tensor]

    def written(self) -> dict[str, Tensor]:
        """Tensor name → bool tensor of the entries that the writers which go had moved."""
        result: dict[str, Tensor] = {}
        for of_task in self.updates.values():
            for name, update in of_task.items():
                result[name] = result[name] | (update != 0) if name in result else update != 0
        return result


class Updates(Mapping[str, Tensor]):
    """Tensor name → a task's update ``Δ``, float64; made when it is asked for, which for most removals is never."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[Tensor, Tensor, Tensor, tuple[int, ...]]] = {}

    def add(self, name: str, index: Tensor, before: Tensor, after: Tensor, shape: tuple[int, ...]) -> None:
        """Enter a tensor: the values of the entries at flat ``index`` before the task, and those after it."""
        self._parts[name] = index, before, after, tuple(shape)

    def __getitem__(self, name: str) -> Tensor:
        index, before, after, shape = self._parts[name]
        result = torch.zeros(shape, dtype=torch.float64)
        put(result, index, after.double() - before.double())
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class Trajectory:
    """The undo logs of the remaining tasks, in the order in which they were trained.

    Args:
        path: directory in which every task's log is a safetensors file, mapped into memory when read; one that holds
            logs already is continued. One directory serves one trajectory. By default logs are kept in memory.
        options: those of :class:`~avalanche_amnesia.unlearning.fidelity.Fidelity`: ``threshold``,
            ``min_active_steps``, ``dtype``. Lossless without them.

    Raises:
        ValueError: for an option that is not allowed.
        TrajectoryError: if ``path`` holds something else.
    """

    def __init__(self, *, path: str | Path | None = None, **options: Any) -> None:
        self.fidelity = Fidelity(**options)
        self._directory = None if path is None else LogDirectory(path)
        self._logs: dict[int, Log] = {}
        self._merged: frozenset[int] = frozenset()
        if self._directory is not None:
            self._logs, self._merged = self._directory.open()

    @property
    def tasks(self) -> tuple[int, ...]:
        """Recorded tasks, in training order."""
        return tuple(task for task in self._logs if task != REPAIR)

    def nbytes(self, task: int | None = None) -> int:
        """Bytes that a task's log takes, or all logs."""
        logs = self._logs.values() if task is None else [self._logs[task]]
        return sum(entry.nbytes for log in logs for entry in log.values())

    def moved(self, task: int) -> dict[str, Tensor]:
        """Tensor name → bool tensor of the entries that the task moved; of a merged task, of those that are kept."""
        return {name: entry.where for name, entry in self._log(task).items()}

    def moved_by_repair(self) -> dict[str, Tensor]:
        """As :meth:`moved`, of the repair that stands; empty where none does."""
        return self.moved(REPAIR) if REPAIR in self._logs else {}

    def report(self) -> pandas.DataFrame:
        """What every task's log costs, and the error that keeping it this way added to the model.

        Returns:
            A row per task with ``entries``, ``share`` (of the parameters that it could have moved), ``bytes``,
            ``bytes_per_parameter``, ``error_max`` and ``error_l2`` (of its weights, against what its training left),
            the same two for each economy in use (``threshold_max`` …), and ``merged``.
        """
        return report({task: self._logs[task] for task in self.tasks}, self._merged)

    def record(
        self,
        task: int,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        active: Mapping[str, Tensor] | None = None,
        parameters: int | None = None,
    ) -> dict[str, Tensor]:
        """Record a finished task.

        Args:
            task: its label, not recorded yet.
            before: tensor name → values before it; tensors that are new since are the task's own and left out.
            after: tensor name → values now.
            active: tensor name → share of the task's steps in which each entry moved; for ``min_active_steps``.
            parameters: how many the report's shares refer to; by default the entries of all tensors in ``before``.

        Returns:
            Tensor name → values that the model must hold from now on, where an economy changed them: put them there
            before anything reads the model. Empty in a lossless store.

        Raises:
            TrajectoryError: if the task is recorded already, a tensor changed its shape, or ``active`` is missing.
            OSError: if the log can't be written; the trajectory is as it was.
        """
        if task in self._logs:
            raise TrajectoryError(f"task {task} is recorded already; recorded tasks: {list(self.tasks)}")
        if self.fidelity.min_active_steps is not None and active is None:
            raise TrajectoryError(
                f"task {task}: min_active_steps={self.fidelity.min_active_steps} needs active=, the share of steps in "
                "which each entry moved; TrajectoryPlugin counts them"
            )
        shared = {name: value.detach() for name, value in after.items() if name in before}
        for name, value in shared.items():
            if value.shape != before[name].shape:
                raise TrajectoryError(
                    f"{name} grew from {tuple(before[name].shape)} to {tuple(value.shape)} during task {task}: an "
                    "update of a growing tensor can't be taken out; use one head per task (MultiHeadModel)"
                )
        commitments = {
            name: self.fidelity.commit(before[name], value, None if active is None else active[name])
            for name, value in shared.items()
        }
        counted = sum(value.numel() for value in shared.values()) if parameters is None else parameters
        log = Log.of(commitments, counted)
        self._change({**self._logs, task: log}, self._merged)
        return {
            name: commitment.values.to(shared[name].device)
            for name, commitment in commitments.items()
            if any(error.entries for error in commitment.errors.values())
        }

    def record_repair(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Record a repair as an update of its own, lossless, behind those of all tasks.

        Whatever is removed next takes it out as well: at most one stands at a time.

        Args:
            before: tensor name → values before it.
            after: tensor name → values now, of the same tensors.

        Raises:
            TrajectoryError: if one stands already.
            OSError: if the log can't be written; the trajectory is as it was. On disk the old files stay until
                :meth:`settle`.
        """
        if REPAIR in self._logs:
            raise TrajectoryError("a repair is recorded already; the next removal takes it out, before another one")
        moved = {name: ~same_bits(value.detach(), before[name]) for name, value in after.items()}
        entries = {name: SparseValues.of(before[name], where) for name, where in moved.items() if bool(where.any())}
        if entries:
            log = Log(entries, sum(where.numel() for where in moved.values()), {})
            self._swap({**self._logs, REPAIR: log}, self._merged)

    def merge(self, tasks: Iterable[int]) -> None:
        """Merge the updates of tasks that will never be taken out; can't be taken apart again.

        Kept is only what taking others out needs: where an earlier task that may still go wrote the same entry, one
        value per stretch of merged writers. A later call adds to the merged tasks.

        Raises:
            TrajectoryError: for a task that is not recorded.
            OSError: if logs can't be written; the trajectory is as it was.
        """
        merged = self._merged | frozenset(tasks)
        for task in merged:
            self._log(task)
        if merged == self._merged:
            return
        self._change(_without_unneeded(self._logs, merged), merged)

    def remove(
        self,
        tasks: Sequence[int],
        current: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        readers: Readers | None = None,
        revisions: Revisions | None = None,
    ) -> Removal:
        """Work out the state without some tasks, and without a repair that stands; changes nothing.

        Args:
            tasks: recorded tasks; none where there is a repair to take out.
            current: tensor name → values now; of tensors that are not named here the logs forget everything.
            before: where a further task is in training, the values before it.
            readers: remaining tasks, in training order, with the entries that they read. What a task that goes wrote
                into such an entry stays, and the first of its readers takes the way back over: once no reader is left
                the entry returns to the value before it.
            revisions: what the updates of remaining tasks, recorded after the first that goes, become.

        Raises:
            TrajectoryError: for a task that is not recorded, or merged.
        """
        for task in tasks:
            self._log(task)
        gone = {*tasks, REPAIR} & self._logs.keys()
        if gone & self._merged:
            raise TrajectoryError(
                f"tasks {sorted(gone & self._merged)} can't be taken out: they became permanent and their updates were "
                "merged; recorded with merge_permanent=False they would have stayed apart"
            )
        order = list(self._logs)
        suffix = order[min(map(order.index, gone)) :]  # earlier logs are not touched: their values came before
        logs = {  # a tensor that goes with the tasks (their head) leaves the later tasks' logs too
            task: log.with_entries({name: entry for name, entry in log.items() if name in current})
            for task, log in self._logs.items()
            if task not in gone
        }
        values: dict[str, Tensor] = {}
        new_before: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        moved: dict[str, Tensor] = {}
        updates = {task: Updates() for task in gone}
        revisions = {} if revisions is None else revisions
        changing = (*(self._logs[task] for task in gone), *revisions.values())
        for name in sorted({name for tensors in changing for name in tensors if name in current}):
            committed = current[name] if before is None or name not in before else before[name]
            revised = {task: of_task[name] for task, of_task in revisions.items() if name in of_task}
            going = chosen_by([self._logs[task][name] for task in gone if name in self._logs[task]])
            writers = [  # where a task wrote nothing that goes it has no part in this
                (task, entry)
                for task in suffix
                if (
                    (entry := self._logs[task].get(name)) is not None
                    and (revised or task in gone or (chosen_by([entry]) & going).any())
                )
                or task in revised
            ]
            reading = {task: reads[name].cpu().reshape(-1) for task, reads in (readers or {}).items() if name in reads}
            replayed, stays = _replay(name, committed, writers, logs, updates, reading, revised)
            if reading and bool(stays.any()):
                shared[name] = stays
            if revised:
                index = positions(~same_bits(replayed, committed.detach().cpu()))
            else:
                index = torch.from_numpy(np.flatnonzero(np.unpackbits(going, count=committed.numel()).view(bool)))
                index = differing(index, take(replayed, index), take(committed.cpu(), index))
            if not len(index):
                continue
            replayed = replayed.to(committed.device)
            values[name], moved[name] = replayed, index.to(committed.device)
            if before is not None and name in before:
                new_before[name] = replayed
                values[name] = moved_along(current[name], before[name], replayed)
                moved[name] = positions(~same_bits(values[name], current[name].detach()))
        logs = {task: log.unless_same(self._logs[task]) for task, log in _without_unneeded(logs, self._merged).items()}
        return Removal(tuple(tasks), values, new_before, logs, shared, updates, moved)

    def values_before(self, task: int, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state before a task; of entries that merged tasks alone wrote since, the state now.

        Args:
            task: a recorded task.
            current: tensor name → values now.

        Raises:
            TrajectoryError: for a task that is not recorded.
        """
        self._log(task)
        since = self.tasks[self.tasks.index(task) :]
        result = {}
        for name, now in current.items():
            value = now.detach().cpu().reshape(-1).clone()
            _wind_back(value, [(later, self._logs[later].get(name)) for later in since])
            result[name] = value.reshape(now.shape).to(now.device)
        return result

    def apply(self, removal: Removal) -> None:
        """Make a removal's logs the trajectory's own; on disk the old files stay until :meth:`settle`.

        Raises:
            OSError: if they can't be written; the trajectory is as it was.
        """
        self._swap(removal.logs, self._merged)

    def rearrange(self, sources: Mapping[str, Tensor]) -> None:
        """Follow a permutation of the entries of some tensors; on disk the old files stay until :meth:`settle`.

        Args:
            sources: tensor name → for each entry, by flat index, the one whose place it takes, int64 ``(n,)``.

        Raises:
            TrajectoryError: if an economy is in use: what it keeps of an entry depends on the entry's place.
            OSError: if the logs can't be written; the trajectory is as it was.
        """
        logs = {}
        for task, log in self._logs.items():
            entries = dict(log)
            for name in entries.keys() & sources.keys():
                entry = entries[name]
                if not isinstance(entry, SparseValues):
                    raise TrajectoryError(f"task {task}: coded updates of {name} can't move; leave dtype= out")
                entries[name] = entry.rearranged(sources[name])
            logs[task] = log.with_entries(entries).unless_same(log)
        self._swap(logs, self._merged)

    @property
    def logs(self) -> Mapping[int, Log]:
        """All logs, for :meth:`restore`; a reference, not a copy."""
        return self._logs

    def restore(self, logs: Mapping[int, Log]) -> None:
        """Go back to what :attr:`logs` returned."""
        self._swap(logs, self._merged)

    def settle(self) -> None:
        """Delete the files of logs that are the trajectory's no longer; :meth:`restore` may still go back to them."""
        if self._directory is not None:
            self._directory.sweep()

    def _change(self, logs: Mapping[int, Log], merged: frozenset[int]) -> None:
        """Swap and settle, or leave everything as it was."""
        before = self._logs, self._merged
        self._swap(logs, merged)
        try:
            self.settle()
        except BaseException:
            self._swap(*before)
            raise

    def _swap(self, logs: Mapping[int, Log], merged: frozenset[int]) -> None:
        """Make some logs the trajectory's own, on disk first."""
        self._logs = dict(logs) if self._directory is None else self._directory.write(logs, merged)
        self._merged = merged

    def _log(self, task: int) -> Log:
        if task not in self._logs:
            raise TrajectoryError(f"task {task} is not recorded; recorded tasks: {list(self.tasks)}")
        return self._logs[task]

    # On disk --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the whole trajectory to one safetensors file."""
        write_logs(Path(path), self._logs, self._merged)

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Trajectory:
        """Read what :meth:`save` wrote; later tasks are recorded with these options."""
        result = cls(**options)
        result._swap(*read_logs(Path(path)))
        return result


_Step = tuple[int, SparseEntries, Tensor, Tensor, Tensor]
"""A task's write: the task, its entry, the flat index, the values before, the values written."""


def _wind_back(value: Tensor, writers: Sequence[tuple[int, SparseEntries | None]]) -> list[_Step]:
    """Take a flat tensor back, in place, to before the first of some writers, noting what each one wrote."""
    steps: list[_Step] = []
    for task, entry in reversed(writers):
        if entry is not None:
            index = positions(entry.where)
            written = take(value, index)
            old = entry.before(written)
            put(value, index, old)
            steps.append((task, entry, index, old, written))
    return steps


def _replay(
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
    read = torch.zeros(committed.numel() if reading else 0, dtype=torch.bool)
    for reads in reading.values():
        read |= reads
    stays = torch.zeros_like(read)
    handed: list[tuple[Tensor, Tensor]] = []
    value = copied(committed)
    nothing = _no_entries(committed)
    dropped = dropped_entries([task for task, _ in writers], revisions)
    steps = _wind_back(value, [(t, nothing if e is None and t in revisions else e) for t, e in writers])
    for task, entry, index, old, written in reversed(steps):  # and forward again without those that go
        if task in updates:
            updates[task].add(name, index, old, written, committed.shape)
            if reading:
                kept = read[index]
                put(value, index[kept], written[kept])
                stays[index[kept]] = True
                updates[task].add(name, index, old, torch.where(kept, old, written), committed.shape)
                handed.append((index[kept], old[kept]))
            continue
        update = written.double() - old.double()
        if task in dropped:
            kept = ~dropped[task][index]
            if not bool(kept.all()):
                entry = logs[task][name] = entry.restricted(~dropped[task])
            index, old, written, update = index[kept], old[kept], written[kept], update[kept]
        revised = _revised(value, revisions[task], index, update) if task in revisions else None
        here = take(value, index)
        unmoved = same_bits(here, old)
        if bool(unmoved.all()):
            put(value, index, written)
        else:
            new = torch.where(unmoved, written, (here.double() + update).to(here.dtype))
            put(value, index, new)
            logs[task][name] = entry.rebased(here, new)
        if revised is not None:
            target, ground, result = revised
            value[target] = result
            logs[task][name] = logs[task].get(name, nothing).extended(target, ground)
    for index, old in handed:
        _hand_over(name, index, old, reading, logs, nothing)
    return value.reshape(committed.shape), stays.reshape(committed.shape) if reading else stays


def _revised(value: Tensor, revision: Revision, index: Tensor, update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat index of the entries that a task's revision names, the values there before the task, and those after."""
    target = revision.index
    own = torch.zeros(value.numel(), dtype=torch.float64).index_copy(0, index, update)
    ground = value[target]
    return target, ground, (ground.double() + revision.update(own[target])).to(value.dtype)


def _no_entries(like: Tensor) -> SparseEntries:
    return SparseValues.of(torch.zeros_like(like, device="cpu"), torch.zeros(like.shape, dtype=torch.bool))


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
        index, values_before = index[~taken], values_before[~taken]


def _without_unneeded(logs: Mapping[int, Log], merged: frozenset[int]) -> dict[int, Log]:
    """Logs of which those of merged tasks hold only what taking others out needs.

    A merged task's entry is needed where an earlier task that may go wrote it too: the way back there leads over it.
    Of several merged writers with no such task's write between them the first one's value before is enough, unless the
    way back to it starts at what itself had written.
    """
    result = {task: log.with_entries(log) for task, log in logs.items()}
    for name in {name for task in merged & set(logs) for name in logs[task]}:
        wrote: Tensor | None = None
        for task, log in result.items():
            if name not in log:
                continue
            where = log[name].where.reshape(-1)
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


def moved_along(current: Tensor, before: Tensor, new_before: Tensor) -> Tensor:
    """Values of a task in training whose starting point moves: its own update so far is kept."""
    shifted = (new_before.double() + (current.detach().double() - before.double())).to(current.dtype)
    return torch.where(same_bits(current.detach(), before), new_before, shifted)
