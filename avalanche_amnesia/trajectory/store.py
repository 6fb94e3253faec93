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

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.bits import as_integers, same_bits
from avalanche_amnesia.saving.encoding import OwnFile
from avalanche_amnesia.saving.values import StateError, checked
from avalanche_amnesia.trajectory.removal import Readers, Removal, Revisions, compute_removal, undo_writes
from avalanche_amnesia.trajectory.sparse import DTYPES, SparseEntries, SparseValues, encode_update, union_of
from avalanche_amnesia.trajectory.undo_log import RoundingError, UndoLog


class TrajectoryError(ValueError):
    """Error for an undo log that can't be recorded, found or removed."""


class Trajectory:
    """Store of every task's weight changes: for each task, the changed entries and their values before the task.

    Args:
        dtype: store updates as ``torch.float32``, ``float16``, ``bfloat16`` or ``int8`` if that is smaller; None:
            lossless.

    Attributes:
        logs: task, or negative number of a repair (training after an unlearning) → undo log. Changes replace the dict.

    Raises:
        ValueError: for an invalid dtype.
    """

    def __init__(self, *, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(map(str, DTYPES))}, or None to keep values as they are; got {dtype!r}"
            )
        self.dtype = dtype
        self.logs: Mapping[int, UndoLog] = {}

    @property
    def tasks(self) -> tuple[int, ...]:
        """Return the recorded tasks, in training order."""
        return tuple(writer for writer in self.logs if writer >= 0)

    @property
    def repairs(self) -> Mapping[int, frozenset[int] | None]:
        """Return a dict of repair training (-1, -2, …) to tasks whose removal also removes it; None: any removal."""
        return {writer: log.repair_of for writer, log in self.logs.items() if writer < 0}

    def writers(self, tasks: Iterable[int]) -> list[int]:
        """Return all writers that a removal of ``tasks`` removes: the tasks, and the repairs that depend on them."""
        tasks = tuple(tasks)
        return [*tasks, *(repair for repair, of in self.repairs.items() if of is None or of & set(tasks))]

    def nbytes(self, task: int | None = None) -> int:
        """Return the size of a task's undo log in bytes, or of all logs if ``task`` is None."""
        return sum(log.nbytes for log in (self.logs.values() if task is None else [self.logs[task]]))

    def moved(self, writer: int) -> dict[str, Tensor]:
        """Return a dict of tensor name to bool tensor, True at entries recorded for the task or repair ``writer``."""
        self._refuse_unknown([writer])
        return {name: entry.where for name, entry in self.logs[writer].items()}

    def moved_with(self, tasks: Iterable[int]) -> dict[str, Tensor]:
        """Return a dict of tensor name to bool tensor, True at entries recorded for ``tasks`` and dependent repairs."""
        return union_of(map(self.moved, self.writers(tasks)))

    def report(self) -> dict[int, dict[str, float]]:
        """Return a table of the tasks' undo logs: sizes, and the rounding error that ``dtype`` causes in the weights.

        Returns:
            Task → row with ``entries``, ``share`` (of the parameters that it could change), ``bytes``,
            ``bytes_per_parameter``, ``error_max`` and ``error_l2`` (change of its weights by rounding).
        """
        rows: dict[int, dict[str, float]] = {}
        for task in self.tasks:
            log = self.logs[task]
            entries, parameters = sum(int(entry.where.sum()) for entry in log.values()), max(log.parameters, 1)
            rows[task] = {
                "entries": entries,
                "share": entries / parameters,
                "bytes": log.nbytes,
                "bytes_per_parameter": log.nbytes / parameters,
                "error_max": log.error.largest,
                "error_l2": sqrt(log.error.squares),
            }
        return rows

    def record(
        self,
        task: int,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        parameters: int | None = None,
    ) -> dict[str, Tensor]:
        """Store a finished task's update in an undo log; if the log's dtype rounds it, return the rounded weights.

        Args:
            task: label of the task, at least 0. It may be recorded already if no tensor has changed since.
            before: tensor name → values before the task; tensors missing here belong to the task and are not recorded.
            after: tensor name → current values.
            parameters: how many entries the task could change (see :meth:`report`); None: all entries of these tensors.

        Returns:
            Tensor name → values rounded by ``dtype``: write them into the model before it is used. Empty in a
            lossless store.

        Raises:
            TrajectoryError: if the task is recorded already, or negative, or a tensor changed its shape.
        """
        if task < 0:
            raise TrajectoryError(f"task {task}: labels must be at least 0; negative numbers are those of repairs")
        shared = {name: value.detach() for name, value in after.items() if name in before}
        for name, value in shared.items():
            if value.shape != before[name].shape:
                raise TrajectoryError(
                    f"{name} grew from {tuple(before[name].shape)} to {tuple(value.shape)} during task {task}: an "
                    "update of a growing tensor can't be taken out; use one head per task (MultiHeadModel)"
                )
        moved, committed, error = dict[str, SparseEntries](), dict[str, Tensor](), RoundingError()
        for name, value in shared.items():
            old, trained = before[name].detach(), value.cpu()
            if torch.equal(as_integers(old.to(value.device)), as_integers(value)):  # most are other tasks' heads
                continue
            values, entries = self._round_and_encode(old.cpu(), trained)
            added = RoundingError.between(values, trained)
            error += added
            if added.entries:
                committed[name] = values.to(value.device)
            if bool(entries.where.any()):
                moved[name] = entries
        if task in self.logs:
            if moved:
                raise TrajectoryError(f"task {task} is recorded already; recorded tasks: {list(self.tasks)}")
            return committed
        counted = sum(value.numel() for value in shared.values()) if parameters is None else parameters
        self.logs = {**self.logs, task: UndoLog(moved, counted, error)}
        return committed

    def _round_and_encode(self, before: Tensor, trained: Tensor) -> tuple[Tensor, SparseEntries]:
        """Return a tensor's values with its update rounded to ``dtype``, and the undo-log entries of the update."""
        if self.dtype is not None and self.dtype.itemsize < trained.element_size():
            return encode_update(before, trained, self.dtype)
        return trained, SparseValues.select(before, ~same_bits(before, trained))

    def record_repair(
        self,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        tasks: Iterable[int] | None = None,
        free: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Store the update of a repair (further training after an unlearning) losslessly, in an undo log of its own.

        Args:
            before: tensor name → values before the repair.
            after: tensor name → current values of the same tensors.
            tasks: tasks whose data the repair used: removing any of them also removes the repair. By default the next
                removal of any task does, and there can be only one such repair at a time.
            free: tensor name → bool tensor of entries that the repair could change, to record even if unchanged;
                only tensors in ``before``.

        Raises:
            TrajectoryError: if ``tasks`` is None, and such a repair is recorded already.
        """
        repairs = self.repairs
        if tasks is None and None in repairs.values():
            raise TrajectoryError("a repair is recorded already; the next removal takes it out, before another one")
        moved = {name: ~same_bits(value.detach(), before[name]) for name, value in after.items()}
        moved |= {name: where | moved[name] for name, where in (free or {}).items()}
        entries = {name: SparseValues.select(before[name], where) for name, where in moved.items() if bool(where.any())}
        if entries:
            repair_of = None if tasks is None else frozenset(tasks)
            log = UndoLog(entries, sum(where.numel() for where in moved.values()), repair_of=repair_of)
            self.logs = {**self.logs, min(repairs, default=0) - 1: log}

    def remove(
        self,
        tasks: Sequence[int],
        current: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        readers: Readers | None = None,
        revisions: Revisions | None = None,
    ) -> Removal:
        """Compute the weights and undo logs without ``tasks`` and without repairs that depend on them; change nothing.

        Args:
            tasks: recorded tasks; if empty, only the repair that any removal removes.
            current: tensor name → current values; the logs drop all tensors missing here.
            before: values before the task in training, if there is one.
            readers: remaining tasks, in training order, with the entries that they use. A removed task's values in
                such entries stay. The undo entry moves to the log of the first reader, so the old value returns when
                the last reader is removed.
            revisions: new updates of remaining tasks that were recorded after the first removed task.

        Raises:
            TrajectoryError: for an unrecorded task.
        """
        self._refuse_unknown(tasks)
        return compute_removal(tasks, set(self.writers(tasks)), self.logs, current, before, readers, revisions)

    def values_before(self, task: int, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors' values before a task's training, by name, by undoing all later changes.

        Args:
            task: a recorded task.
            current: tensor name → current values.

        Raises:
            TrajectoryError: for an unrecorded task.
        """
        self._refuse_unknown([task])
        order = list(self.logs)
        since = order[order.index(task) :]
        result = {}
        for name, now in current.items():
            value = now.detach().cpu().reshape(-1).clone()
            undo_writes(value, [(later, self.logs[later].get(name)) for later in since])
            result[name] = value.reshape(now.shape).to(now.device)
        return result

    def apply(self, removal: Removal) -> None:
        """Replace the undo logs by the new logs in ``removal``, the result of :meth:`remove`."""
        self.logs = removal.logs

    def _refuse_unknown(self, writers: Iterable[int]) -> None:
        """Raise TrajectoryError if a writer (task or repair) is not recorded."""
        for writer in writers:
            if writer not in self.logs:
                raise TrajectoryError(f"task {writer} is not recorded; recorded tasks: {list(self.tasks)}")

    # In a saved state -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the logs and dtype for a saved state, which stores each log in a separate file."""
        return {"dtype": str(self.dtype), "logs": {at: OwnFile(log.state()) for at, log in self.logs.items()}}

    def load_state(self, state: Any) -> None:
        """Restore the logs from a result of :meth:`state`."""
        dtype, logs = checked(state, dtype=str, logs=dict[int, dict])
        if dtype != str(self.dtype):
            raise StateError(f"a trajectory with dtype={dtype} was saved, and this one has dtype={self.dtype}")
        self.logs = {writer: UndoLog.from_state(log) for writer, log in logs.items()}
