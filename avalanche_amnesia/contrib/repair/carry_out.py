"""Repair: a few steps on samples of the remaining tasks that lost something.

What a repair changes is recorded as an update of its own, behind those of all tasks. It stands until the next request,
which takes it out with the tasks that go; then what is affected by all that is repaired anew. So nothing of a repair
outlives the samples that it was made with, or builds up from request to request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia.audit.record import RepairSummary
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.models.multi_head import inside_backbone
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.trajectory.replay import moved_along
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.task_modules import own_parameters


class Repair(Protocol):
    """Holds samples of the remaining tasks, and trains on them inside an unlearning."""

    mode: str

    def n_samples(self, task: int) -> int:
        """Number of samples of a task that it holds."""

    def forget(self, tasks: Collection[int], change: Transaction) -> str:
        """Drop everything of some tasks; returns a line for the record."""

    def repair(
        self,
        model: TaskMaskedModel,
        optimizer: Optimizer,
        tasks: Sequence[int],
        compensated: Collection[int],
        free: Mapping[str, Tensor],
    ) -> int:
        """Train the tasks' own parameters, and nothing else but the free entries of the backbone."""


def repairable(
    repair: Repair | None, model: nn.Module, affected: Sequence[int], tainted: Collection[int]
) -> tuple[int, ...]:
    """The affected tasks that would be repaired: of the others, deletion has restored what they learned exactly."""
    if repair is None or not isinstance(model, TaskMaskedModel):
        return ()
    masked = model.masked_tasks
    return tuple(t for t in affected if t in tainted and t in masked and repair.n_samples(t))


def free_entries(model: TaskMaskedModel, tasks: Sequence[int], changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries of the backbone that the deletion changed, and that these tasks, and no others, read."""
    others = [task for task in model.tasks if task not in tasks and task != model.current_task]
    if not set(others) <= set(model.masked_tasks):
        return {}  # a task without a mask reads every entry
    masks = model.masks
    held = model.graph.parameter_use(*(masks[task] for task in others)) if others else {}
    free, changed = {}, inside_backbone(changed)
    for name, use in model.graph.parameter_use(*(masks[task] for task in tasks)).items():
        if name in changed:
            entries = changed[name] & (use > 0)
            entries = entries & ~(held[name] > 0) if held else entries
            if bool(entries.any()):
                free[name] = entries
    return free


def carry_out(
    repair: Repair,
    model: TaskMaskedModel,
    optimizer: Optimizer,
    trajectory: Trajectory,
    *,
    tasks: Sequence[int],
    compensated: Collection[int],
    changed: Mapping[str, Tensor],
    before: dict[str, Tensor] | None,
    change: Transaction,
) -> RepairSummary:
    """Repair tasks and record it; in the middle of a task, repair the values before that task."""
    own = own_parameters(model, *tasks)
    parameters = dict(model.backbone.named_parameters(prefix="backbone"))
    parameters |= {name: p for name, p in model.named_parameters() if name in own}
    now = {name: p.detach().clone() for name, p in parameters.items()}
    committed = {name: value if before is None or name in own else before[name] for name, value in now.items()}
    statistics = set(model.buffer_names(tasks))
    for name, value in now.items():
        change.call(parameters[name].copy_, value)
    for name, buffer in model.named_buffers():
        if name in statistics:
            change.call(buffer.copy_, buffer.clone())
    if before is not None:
        change.call(before.update, dict(before))
        for name, value in committed.items():
            parameters[name].copy_(value)
    free = free_entries(model, tasks, changed)
    steps = repair.repair(model, optimizer, tasks, compensated, free)
    moved = {n: p.detach().clone() for n, p in parameters.items() if not same_bits(p.detach(), committed[n]).all()}
    noted = {f"backbone.{name}": where for name, where in free.items()}
    after = moved | {name: committed[name] for name in noted.keys() - moved.keys()}
    trajectory.record_repair({name: committed[name] for name in after}, after, free=noted)
    if before is not None:
        for name, value in committed.items():
            parameters[name].copy_(moved_along(now[name], value, moved[name]) if name in moved else now[name])
        before.update(moved)
    return RepairSummary(
        mode=repair.mode,
        samples={task: repair.n_samples(task) for task in tasks},
        steps=steps,
        entries={name: int((~same_bits(value, committed[name])).sum()) for name, value in sorted(moved.items())},
    )
