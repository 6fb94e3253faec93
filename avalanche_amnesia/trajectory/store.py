"""Trajectory of a training: the update ``Δ^(τ)`` of every task, stored so that it can be removed.

A parameter is its initial value plus one update per task, ``θ^(t) = θ^(0) + Σ_τ Δ^(τ)``.

The store is an undo log: for each task and tensor, the changed entries with their values *before* the task. The
update ``Δ`` of a task at an entry is the value before the next writer minus the value before the task. A removal
replays the remaining writers of each entry on the value before the first removed writer:

* an entry written only by removed writers is restored to its initial value, bit for bit;
* an entry written last by removed writers is restored to the bits before those writers;
* an entry with later writers loses the removed update, subtracted in float64.

Repairs are writers too, with negative numbers, recorded after the tasks trained before them. A repair is removed
together with any task whose data it used, or with the next removal.

A lower precision (``dtype``) is *committed*: when the task ends, before the model is used, its weights are rounded like
the log. This changes the weights, but undoing stays exact, and the error is visible in the task's own accuracy. If only
the log were rounded, a removal would leave residue of unlearned tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.bits import as_integers, same_bits
from avalanche_amnesia.saving.encoding import Apart
from avalanche_amnesia.saving.values import StateError, checked
from avalanche_amnesia.trajectory.log_files import LogDirectory, TrajectoryError, check_file
from avalanche_amnesia.trajectory.removal import Readers, Removal, Revisions, wind_back, without_unneeded, work_out
from avalanche_amnesia.trajectory.sparse import DTYPES, SparseEntries, SparseValues, coded, united
from avalanche_amnesia.trajectory.undo_log import AddedError, Log


class Trajectory:
    """Undo logs of the remaining tasks and of repairs, in the order of writing.

    Args:
        path: directory with one safetensors file per task's log, memory-mapped; existing logs are continued. By
            default logs are in memory. A directory belongs to one trajectory, and has only the files of its current
            logs: files replaced by a change or an unlearning are deleted. A pickled trajectory contains its logs.
            After unpickling it reads nothing from the directory, and its first change takes the directory over:
            missing files are written, and all other log files deleted, unless another trajectory was started there.
            From then on, the former owner's changes are refused. A ``copy.deepcopy`` has its logs in memory and leaves
            the directory to the original.
        dtype: store updates as ``torch.float32``, ``float16``, ``bfloat16`` or ``int8`` if that is smaller; None:
            lossless.

    Raises:
        ValueError: for an invalid dtype.
        TrajectoryError: if ``path`` has other or damaged files, or can't be written to; later, if a log's file turns
            out to be damaged (files have checksums), or before a change if the directory belongs to another trajectory.
    """

    def __init__(self, *, path: str | Path | None = None, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(map(str, DTYPES))}, or None to keep values as they are; got {dtype!r}"
            )
        self.dtype = dtype
        self._directory = None if path is None else LogDirectory(path)
        self._logs: dict[int, Log] = {}
        self._merged: frozenset[int] = frozenset()
        if self._directory is not None:
            self._logs, self._merged = self._directory.open()

    @property
    def directory(self) -> Path | None:
        """Return the directory of the log files; None if logs are in memory."""
        return None if self._directory is None else self._directory.path

    @property
    def tasks(self) -> tuple[int, ...]:
        """Return the recorded tasks, in training order."""
        return tuple(writer for writer in self._logs if writer >= 0)

    @property
    def repairs(self) -> Mapping[int, frozenset[int] | None]:
        """Return repair number (negative) → tasks whose removal also removes the repair; None: any removal does."""
        return {writer: log.repair_of for writer, log in self._logs.items() if writer < 0}

    def writers(self, tasks: Iterable[int]) -> list[int]:
        """Return the writers that a removal of ``tasks`` removes: the tasks, and the repairs that depend on them."""
        tasks = tuple(tasks)
        return [*tasks, *(repair for repair, of in self.repairs.items() if of is None or of & set(tasks))]

    def nbytes(self, task: int | None = None) -> int:
        """Return the size of a task's log in bytes, or of all logs if ``task`` is None."""
        logs = self._logs.values() if task is None else [self._logs[task]]
        return sum(log.nbytes for log in logs)

    def moved(self, writer: int) -> dict[str, Tensor]:
        """Return tensor name → bool tensor, True at the entries in a task's or repair's log: those that it changed."""
        return {name: entry.where for name, entry in self._log(writer).items()}

    def moved_with(self, tasks: Iterable[int]) -> dict[str, Tensor]:
        """Return tensor name → bool tensor, True at entries changed by ``tasks`` or repairs removed with them."""
        return united(map(self.moved, self.writers(tasks)))

    def report(self) -> dict[int, dict[str, float]]:
        """Return a table of all logs: size in bytes, and rounding error of the model by ``dtype``.

        Returns:
            Task → row with ``entries``, ``share`` (of the parameters that it could change), ``bytes``,
            ``bytes_per_parameter``, ``error_max`` and ``error_l2`` (change of its weights by rounding), and
            ``merged``.
        """
        rows: dict[int, dict[str, float]] = {}
        for task in self.tasks:
            log = self._log(task)
            entries, parameters = sum(int(entry.where.sum()) for entry in log.values()), max(log.parameters, 1)
            rows[task] = {
                "entries": entries,
                "share": entries / parameters,
                "bytes": log.nbytes,
                "bytes_per_parameter": log.nbytes / parameters,
                "error_max": log.error.largest,
                "error_l2": sqrt(log.error.squares),
                "merged": task in self._merged,
            }
        return rows

    def record(
        self,
        task: int,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        parameters: int | None = None,
    ) -> dict[str, Tensor]:
        """Store the update of a finished task in an undo log; return the tensors' values rounded by ``dtype``.

        Args:
            task: label of the task, at least 0 and not recorded yet.
            before: tensor name → values before the task; tensors missing here belong to the task and are not recorded.
            after: tensor name → current values.
            parameters: number of parameters for the report's shares; by default the size of all tensors in both.

        Returns:
            Tensor name → values rounded by ``dtype``: write them into the model before it is used. Empty in a
            lossless store.

        Raises:
            TrajectoryError: if the task is recorded already, or negative, or a tensor changed its shape.
            OSError: if the log can't be written; the trajectory is unchanged.
        """
        if task in self._logs:
            raise TrajectoryError(f"task {task} is recorded already; recorded tasks: {list(self.tasks)}")
        if task < 0:
            raise TrajectoryError(f"task {task}: labels must be at least 0; negative numbers are those of repairs")
        shared = {name: value.detach() for name, value in after.items() if name in before}
        for name, value in shared.items():
            if value.shape != before[name].shape:
                raise TrajectoryError(
                    f"{name} grew from {tuple(before[name].shape)} to {tuple(value.shape)} during task {task}: an "
                    "update of a growing tensor can't be taken out; use one head per task (MultiHeadModel)"
                )
        moved, committed, error = dict[str, SparseEntries](), dict[str, Tensor](), AddedError()
        for name, value in shared.items():
            old, trained = before[name].detach(), value.cpu()
            if torch.equal(as_integers(old.to(value.device)), as_integers(value)):  # most are other tasks' heads
                continue
            values, entries = self._kept(old.cpu(), trained)
            added = AddedError.between(values, trained)
            error += added
            if added.entries:
                committed[name] = values.to(value.device)
            if bool(entries.where.any()):
                moved[name] = entries
        counted = sum(value.numel() for value in shared.values()) if parameters is None else parameters
        self._change({**self._logs, task: Log(moved, counted, error)}, self._merged)
        return committed

    def _kept(self, before: Tensor, trained: Tensor) -> tuple[Tensor, SparseEntries]:
        """Return a tensor's values, rounded by ``dtype``, and the undo-log entries of its update."""
        if self.dtype is not None and self.dtype.itemsize < trained.element_size():
            return coded(before, trained, self.dtype)
        return trained, SparseValues.of(before, ~same_bits(before, trained))

    def record_repair(
        self,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        tasks: Iterable[int] | None = None,
        free: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Store the update of a repair, without loss, in an undo log of its own, after the logs of all tasks.

        Args:
            before: tensor name → values before the repair.
            after: tensor name → current values of the same tensors.
            tasks: tasks whose data the repair used: removing any of them also removes the repair. By default the next
                removal of any task does, and there can be only one such repair at a time.
            free: tensor name → bool tensor of entries that the repair could change, to record even if unchanged;
                only tensors in ``before``.

        Raises:
            TrajectoryError: if ``tasks`` is None, and such a repair is recorded already.
            OSError: if the log can't be written; the trajectory is unchanged. On disk the old files stay until
                :meth:`settle`.
        """
        repairs = self.repairs
        if tasks is None and None in repairs.values():
            raise TrajectoryError("a repair is recorded already; the next removal takes it out, before another one")
        moved = {name: ~same_bits(value.detach(), before[name]) for name, value in after.items()}
        moved |= {name: where | moved[name] for name, where in (free or {}).items()}
        entries = {name: SparseValues.of(before[name], where) for name, where in moved.items() if bool(where.any())}
        if entries:
            repair_of = None if tasks is None else frozenset(tasks)
            log = Log(entries, sum(where.numel() for where in moved.values()), repair_of=repair_of)
            self._swap({**self._logs, min(repairs, default=0) - 1: log}, self._merged)

    def merge(self, tasks: Iterable[int]) -> None:
        """Merge the updates of ``tasks``, which can then never be removed; this is irreversible.

        Only the values needed to remove further tasks stay: for entries that an earlier, removable task wrote too,
        one value per sequence of merged writers. A later call adds to the merged tasks.

        Raises:
            TrajectoryError: for an unrecorded task, or a log file damaged on disk.
            OSError: if logs can't be written; the trajectory is unchanged.
        """
        merged = self._merged | frozenset(tasks)
        self._look_at(merged)
        if merged == self._merged:
            return
        self._look_at(self._logs)
        self._change(without_unneeded(self._logs, merged), merged)

    def remove(
        self,
        tasks: Sequence[int],
        current: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        readers: Readers | None = None,
        revisions: Revisions | None = None,
    ) -> Removal:
        """Return the :class:`Removal` of ``tasks`` and their repairs: the state without them; change nothing.

        Args:
            tasks: recorded tasks; if empty, only the repair that any removal removes.
            current: tensor name → current values; the logs drop all tensors missing here.
            before: values before the task in training, if there is one.
            readers: remaining tasks, in training order, with the entries that they use. A removed task's values in
                such entries stay. The undo entry moves to the log of the first reader, so the old value returns when
                the last reader is removed.
            revisions: new updates of remaining tasks that were recorded after the first removed task.

        Raises:
            TrajectoryError: for an unrecorded or merged task, or a log file damaged on disk.
        """
        self._look_at(tasks)
        gone = set(self.writers(tasks))
        if gone & self._merged:
            raise TrajectoryError(
                f"tasks {sorted(gone & self._merged)} can't be taken out: they became permanent and their updates were "
                "merged; recorded with merge_permanent=False they would have stayed apart"
            )
        order = list(self._logs)
        any_of_them = self._merged or readers or revisions  # only these need logs before the first removed one
        self._look_at(order[0 if any_of_them else min(map(order.index, gone), default=len(order)) :])
        return work_out(tasks, gone, self._logs, self._merged, current, before, readers, revisions)

    def values_before(self, task: int, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all values before a task's training; entries written since only by merged tasks have current values.

        Args:
            task: a recorded task.
            current: tensor name → current values.

        Raises:
            TrajectoryError: for an unrecorded task, or a log file damaged on disk.
        """
        self._log(task)
        order = list(self._logs)
        since = order[order.index(task) :]
        self._look_at(since[1:])
        result = {}
        for name, now in current.items():
            value = now.detach().cpu().reshape(-1).clone()
            wind_back(value, [(later, self._logs[later].get(name)) for later in since])
            result[name] = value.reshape(now.shape).to(now.device)
        return result

    def apply(self, removal: Removal) -> None:
        """Replace the logs by those of a computed removal; old files stay on disk until :meth:`settle`."""
        self._swap(removal.logs, self._merged)

    @property
    def logs(self) -> Mapping[int, Log]:
        """Return all logs, as a reference and not a copy, for :meth:`restore`."""
        return self._logs

    def restore(self, logs: Mapping[int, Log]) -> None:
        """Restore a former value of :attr:`logs`; in memory, this succeeds even if writing to disk fails."""
        self._logs = dict(logs)
        self._swap(logs, self._merged)

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the current logs, if they have been replaced when it is called."""
        logs = self.logs
        return lambda: None if self.logs is logs else self.restore(logs)

    def check_directory(self) -> None:
        """Raise TrajectoryError if another trajectory has changed the directory of the log files."""
        if self._directory is not None:
            self._directory.check()

    def settle(self) -> None:
        """Delete log files that the directory's index no longer lists."""
        if self._directory is not None:
            self._directory.sweep()

    def _change(self, logs: Mapping[int, Log], merged: frozenset[int]) -> None:
        """Replace the logs and merged tasks, and delete old files; if an error occurs, restore the former ones."""
        before = self._logs, self._merged
        self._swap(logs, merged)  # keeps the old files on disk until the change has succeeded
        try:
            self.settle()
        except BaseException:
            self._logs, self._merged = before
            self._swap(*before)
            raise

    def _swap(self, logs: Mapping[int, Log], merged: frozenset[int]) -> None:
        """Replace the logs and merged tasks, on disk first and then in memory."""
        self._logs = dict(logs) if self._directory is None else self._directory.write(logs, merged)
        self._merged = merged

    def _log(self, task: int) -> Log:
        if task not in self._logs:
            raise TrajectoryError(f"task {task} is not recorded; recorded tasks: {list(self.tasks)}")
        check_file(task, self._logs[task])
        return self._logs[task]

    def _look_at(self, writers: Iterable[int]) -> None:
        """Raise TrajectoryError if a writer (task or repair) is not recorded, or if its log file is damaged."""
        for writer in writers:
            self._log(writer)

    # In a saved state -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the logs, merged tasks and dtype for a saved state, which stores each log in a separate file."""
        self._look_at(self._logs)  # a damaged log must not get a new checksum
        logs = {writer: Apart(log.state, (log,)) for writer, log in self._logs.items()}
        return {"dtype": str(self.dtype), "logs": logs, "merged": self._merged}

    def load_state(self, state: Any) -> None:
        """Load a result of :meth:`state`; the next change writes the loaded logs to this trajectory's directory."""
        dtype, logs, merged = checked(state, dtype=str, logs=dict[int, dict], merged=frozenset[int])
        if dtype != str(self.dtype):
            raise StateError(f"a trajectory with dtype={dtype} was saved, and this one has dtype={self.dtype}")
        self._logs, self._merged = {writer: Log.from_state(log) for writer, log in logs.items()}, merged
