"""What every task changed, kept so that it can be taken out again (METHOD §6).

The store is an undo log: per task and tensor, the values *before* the task of the entries that the task moved. The
update ``Δ`` of a task at an entry is the value before the next writer minus its own. Taking tasks out replays the
remaining writers of each entry on top of the value before the first one that goes:

* an entry that only they wrote gets its initial value back, bit for bit;
* an entry that they wrote last gets the bits before them;
* an entry that others wrote later loses their update, subtracted in float64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.unlearning.sparse import SparseValues

Log = dict[str, SparseValues]
Readers = Mapping[int, Mapping[str, Tensor]]
"""Task → tensor name → bool tensor of the entries that it reads, and that must stay as they are."""


class TrajectoryError(ValueError):
    """A task's update can't be recorded or found."""


@dataclass(frozen=True)
class Removal:
    """What taking tasks out of a trajectory leads to; nothing has been changed yet.

    Attributes:
        tasks: the tasks that go.
        values: tensor name → new values, for tensors that change.
        before: the same for the values before a task that is still in training; empty between tasks.
        logs: the remaining tasks' undo logs afterwards.
        shared: tensor name → bool tensor of the entries that keep what the tasks wrote, as others read them.
        updates: task that goes → tensor name → its update ``Δ``, float64: for copies of old states (an anchor, say).
    """

    tasks: tuple[int, ...]
    values: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    logs: Mapping[int, Log]
    shared: Mapping[str, Tensor]
    updates: Mapping[int, Mapping[str, Tensor]]


class Trajectory:
    """The undo logs of the remaining tasks, in the order in which they were trained."""

    def __init__(self) -> None:
        self._logs: dict[int, Log] = {}

    @property
    def tasks(self) -> tuple[int, ...]:
        """Recorded tasks, in training order."""
        return tuple(self._logs)

    def nbytes(self, task: int | None = None) -> int:
        """Bytes that a task's log takes, or all logs."""
        logs = self._logs.values() if task is None else [self._logs[task]]
        return sum(entry.nbytes for log in logs for entry in log.values())

    def moved(self, task: int) -> dict[str, Tensor]:
        """Tensor name → bool tensor of the entries that the task moved."""
        return {name: entry.where for name, entry in self._log(task).items()}

    def record(self, task: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Record a finished task.

        Args:
            task: its label, not recorded yet.
            before: tensor name → values before it; tensors that are new since are the task's own and left out.
            after: tensor name → values now.

        Raises:
            TrajectoryError: if the task is recorded already, or a tensor changed its shape.
        """
        if task in self._logs:
            raise TrajectoryError(f"task {task} is recorded already; recorded tasks: {list(self._logs)}")
        shared = {name: value for name, value in after.items() if name in before}
        for name, value in shared.items():
            if value.shape != before[name].shape:
                raise TrajectoryError(
                    f"{name} grew from {tuple(before[name].shape)} to {tuple(value.shape)} during task {task}: an "
                    "update of a growing tensor can't be taken out; use one head per task (MultiHeadModel)"
                )
        moved = {name: ~same_bits(before[name], value.detach()) for name, value in shared.items()}
        self._logs[task] = {
            name: SparseValues.of(before[name], where) for name, where in moved.items() if bool(where.any())
        }

    def remove(
        self,
        tasks: Sequence[int],
        current: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        readers: Readers | None = None,
    ) -> Removal:
        """Work out the state without some tasks; changes nothing.

        Args:
            tasks: recorded tasks.
            current: tensor name → values now; of tensors that are not named here the logs forget everything.
            before: where a further task is in training, the values before it.
            readers: remaining tasks, in training order, with the entries that they read. What a task that goes wrote
                into such an entry stays, and the first of its readers takes the way back over: once no reader is left
                the entry returns to the value before it.

        Raises:
            TrajectoryError: for a task that is not recorded.
        """
        gone = set(tasks)
        for task in tasks:
            self._log(task)
        first = min(map(self.tasks.index, tasks))
        suffix = self.tasks[first:]  # earlier logs are not touched: their values came before
        logs = {  # a tensor that goes with the tasks (their head) leaves the later tasks' logs too
            task: {name: entry for name, entry in log.items() if name in current}
            for task, log in self._logs.items()
            if task not in gone
        }
        values: dict[str, Tensor] = {}
        new_before: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        updates: dict[int, dict[str, Tensor]] = {task: {} for task in tasks}
        for name in sorted({name for task in gone for name in self._logs[task] if name in current}):
            committed = current[name] if before is None or name not in before else before[name]
            writers = [(task, self._logs[task].get(name)) for task in suffix]
            reading = {task: reads[name].cpu().reshape(-1) for task, reads in (readers or {}).items() if name in reads}
            replayed, stays = _replay(name, committed, writers, logs, updates, reading)
            if bool(stays.any()):
                shared[name] = stays
            if same_bits(replayed, committed.detach().cpu()).all():
                continue
            replayed = replayed.to(committed.device)
            values[name] = replayed
            if before is not None and name in before:
                new_before[name] = replayed
                values[name] = _moved_along(current[name], before[name], replayed)
        return Removal(tuple(tasks), values, new_before, logs, shared, updates)

    def apply(self, removal: Removal) -> None:
        """Make a removal's logs the trajectory's own."""
        self._logs = dict(removal.logs)

    @property
    def logs(self) -> Mapping[int, Log]:
        """All logs, for :meth:`restore`; a reference, not a copy."""
        return self._logs

    def restore(self, logs: Mapping[int, Log]) -> None:
        """Go back to what :attr:`logs` returned."""
        self._logs = dict(logs)

    def _log(self, task: int) -> Log:
        if task not in self._logs:
            raise TrajectoryError(f"task {task} is not recorded; recorded tasks: {list(self._logs)}")
        return self._logs[task]

    # On disk --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the trajectory to one safetensors file."""
        tensors = {
            f"{task}/{name}/{part}": getattr(entry, part)
            for task, log in self._logs.items()
            for name, entry in log.items()
            for part in ("chosen", "values")
        }
        shapes = {str(task): {name: list(e.shape) for name, e in log.items()} for task, log in self._logs.items()}
        save_file(tensors, str(path), metadata={"tasks": json.dumps(list(self._logs)), "shapes": json.dumps(shapes)})

    @classmethod
    def load(cls, path: str | Path) -> Trajectory:
        """Read what :meth:`save` wrote."""
        result = cls()
        with safe_open(str(path), framework="pt") as file:
            shapes = json.loads(file.metadata()["shapes"])
            for task in json.loads(file.metadata()["tasks"]):
                result._logs[task] = {
                    name: SparseValues(
                        file.get_tensor(f"{task}/{name}/chosen"),
                        file.get_tensor(f"{task}/{name}/values"),
                        tuple(shape),
                    )
                    for name, shape in shapes[str(task)].items()
                }
        return result


def _replay(
    name: str,
    committed: Tensor,
    writers: Sequence[tuple[int, SparseValues | None]],
    logs: dict[int, Log],
    updates: dict[int, dict[str, Tensor]],
    reading: Mapping[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """Values of one tensor without the writers that go (the keys of ``updates``, which receives their updates).

    Puts the remaining writers' new values before into ``logs``. The second result marks the entries that keep what
    those writers wrote, because a remaining task reads them (``reading``: task → bool ``(n,)``).
    """
    read = torch.zeros(committed.numel(), dtype=torch.bool)
    for reads in reading.values():
        read |= reads
    stays = torch.zeros_like(read)
    handed: list[tuple[Tensor, Tensor]] = []
    value = committed.detach().cpu().reshape(-1).clone()
    steps: list[tuple[int, SparseValues, Tensor, Tensor, Tensor]] = []
    for task, entry in reversed(writers):  # back to before the first of them, noting what each one wrote
        if entry is not None:
            index = entry.where.reshape(-1).nonzero()[:, 0]
            steps.append((task, entry, index, entry.values, value[index]))
            value[index] = entry.values
    for task, entry, index, old, written in reversed(steps):  # and forward again without those that go
        update = written.double() - old.double()
        if task in updates:
            kept = read[index]
            value[index[kept]] = written[kept]
            stays[index[kept]] = True
            update = torch.where(kept, 0.0, update)
            handed.append((index[kept], old[kept]))
            updates[task][name] = (
                torch.zeros(committed.shape, dtype=torch.float64).flatten().index_copy(0, index, update)
            )
            updates[task][name] = updates[task][name].reshape(committed.shape)
            continue
        here = value[index]
        logs[task][name] = SparseValues(entry.chosen, here, entry.shape)
        value[index] = torch.where(same_bits(here, old), written, (here.double() + update).to(here.dtype))
    for index, old in handed:
        _hand_over(name, index, old, reading, logs, tuple(committed.shape))
    return value.reshape(committed.shape), stays.reshape(committed.shape)


def _hand_over(
    name: str,
    index: Tensor,
    values_before: Tensor,
    reading: Mapping[int, Tensor],
    logs: dict[int, Log],
    shape: tuple[int, ...],
) -> None:
    """Enter the values before some entries into the log of the first task that reads each of them."""
    for task, reads in reading.items():
        taken = reads[index]
        if not bool(taken.any()):
            continue
        entry = logs[task].get(name)
        where = torch.zeros_like(reads) if entry is None else entry.where.reshape(-1)
        old = torch.zeros(len(reads), dtype=values_before.dtype)
        if entry is not None:
            old[where] = entry.values
        where[index[taken]] = True
        old[index[taken]] = values_before[taken]
        logs[task][name] = SparseValues.of(old.reshape(shape), where.reshape(shape))
        index, values_before = index[~taken], values_before[~taken]


def _moved_along(current: Tensor, before: Tensor, new_before: Tensor) -> Tensor:
    """Values of a task in training whose starting point moves: its own update so far is kept."""
    shifted = (new_before.double() + (current.detach().double() - before.double())).to(current.dtype)
    return torch.where(same_bits(current.detach(), before), new_before, shifted)
