"""Plugin for compensation by shadows: weight copies that learn later tasks as if an earlier task were unlearned."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.contrib.shadows.shadow import Shadow, entries_first_used, entries_in_use, method_plugins
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import backbone_entries, single_task
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.training import HATPlugin, TrajectoryPlugin
from avalanche_amnesia.training.norm_statistics import TaskStatistics, running_norms
from avalanche_amnesia.trajectory.removal import Removal, Revision, Revisions
from avalanche_amnesia.trajectory.sparse import SparseValues
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.trajectory.undo_log import entries_from_state, entries_state
from avalanche_amnesia.transaction import Transaction


@dataclass(frozen=True)
class Backup:
    """Stored result of one shadow (weight copy): a task's updates and norms, learned without one earlier task."""

    updates: Mapping[str, SparseValues]
    parts: Mapping[str, Tensor]


@dataclass(frozen=True)
class _ShadowedTask:
    """State of a training: per earlier task a shadow (weight copy without that task), and normalisation statistics."""

    statistics: TaskStatistics
    shadows: dict[int, Shadow] = field(default_factory=dict)


class BackupPlugin(Plugin):
    """Avalanche plugin that also trains each task on shadows: weight copies from which an earlier task is removed.

    There is one shadow per earlier task that may be unlearned. It owns the entries that the earlier task was the first
    to use, so entries of still earlier tasks never change, and starts at their values before that task. Its
    cross-entropy, through the head and mask of the task in training, is added to the loss (mean over the shadows); it
    trains only the shadow, so the main training is bit-identical to a training without shadows. When the task ends,
    the shadow's updates are kept at entries that both tasks use. If the earlier task is unlearned, they become the
    later task's update (at common entries the newest task's), and the shadow's norms replace that task's norms.
    Shadows of permanent or unlearned tasks are dropped, and after a request during a training those of its task.

    Needs :class:`UnlearningPlugin`, and before it in the list of plugins :class:`HATPlugin` and
    :class:`TrajectoryPlugin`. If several tasks are unlearned together, a later task gets its norms from the shadow of
    the last trained of them.

    Attributes:
        kept: task → earlier task → :class:`Backup`.

    Raises:
        ValueError: before a training, if a required plugin is missing.
        TypeError: before a training, if the model is not a :class:`MaskedModel`.

    Reference: shadows are AmnesiacHAT's copies, by entries in place of units; ``experiments/published_copies.py`` has
    the published form.
    """

    shadow_class = Shadow

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, dict[int, Backup]] = {}
        self._now: _ShadowedTask | None = None

    def state(self) -> dict[str, Any]:
        """Return the state to save: updates and norms learned by shadows (weight copies without an earlier task)."""
        kept = {
            task: {other: {**vars(backup), "updates": entries_state(backup.updates)} for other, backup in of.items()}
            for task, of in self.kept.items()
        }
        return {"kept": kept}

    def load_state(self, state: Any) -> None:
        """Load a saved state: updates and norms learned by shadows (weight copies without an earlier task)."""
        [kept] = checked(state, kept=dict)
        self.kept = {
            task: {other: Backup(entries_from_state(held["updates"]), held["parts"]) for other, held in of.items()}
            for task, of in kept.items()
        }

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: check that the model is a MaskedModel and that the required plugins are present."""
        _required_parts(strategy)

    @torch.no_grad()
    def begin(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Before a training: create a shadow (weight copy) per task in ``unlearnable`` that can influence ``task``."""
        self.undo_training(strategy)
        model, masking, recorder = _required_parts(strategy)
        trajectory = recorder.trajectory
        self._now = _ShadowedTask(TaskStatistics(model, task, masking.masks.statistics_batches))
        values = {name: p.detach() for name, p in model.backbone.named_parameters(prefix="backbone")}
        inside_values = backbone_entries(values)
        # Unlearning a task can't affect this one if the two are isolated, so no shadow is needed.
        seen = [other for other in unlearnable if masking.influences is None or other in masking.influences]
        for other in seen:
            region = self._entries_to_train(model, trajectory.tasks, other)
            # Outside its region a shadow uses the main weights minus the earlier task's update.
            written = backbone_entries(trajectory.remove([other], values).updates[other])
            offset = {
                name: torch.where(inside, 0.0, written[name].to(inside_values[name]))
                for name, inside in region.items()
                if name in written
            }
            offset = {name: outside for name, outside in offset.items() if bool((outside != 0).any())}
            region = {name: inside for name, inside in region.items() if bool(inside.any()) or name in offset}
            if any(bool(inside.any()) for inside in region.values()):
                start = self._initial_values(model, trajectory, task, other, values)
                self._now.shadows[other] = self.shadow_class(model, task, region, start, offset, strategy.optimizer)

    def _entries_to_train(self, model: MaskedModel, tasks: Sequence[int], other: int) -> dict[str, Tensor]:
        """Return masks, by parameter name, of entries first used by ``other``; the shadow without it trains these."""
        return entries_first_used(model, other, earlier=tasks[: tasks.index(other)])

    def _initial_values(
        self, model: MaskedModel, trajectory: Trajectory, task: int, other: int, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return initial weights of the shadow that learns ``task`` without ``other``: values from before ``other``."""
        return backbone_entries(trajectory.values_before(other, values))

    def before_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the backward pass: add the mean loss of the shadows (weight copies without an earlier task)."""
        now = self._now
        if now is None or not now.shadows:
            return
        task, x, y = now.statistics.task, strategy.mb_x, strategy.mb_y
        now.statistics.see(strategy)
        if single_task(strategy.mb_task_id) != task:  # replayed samples train only the main network
            rows = strategy.mb_task_id == task
            x, y = x[rows], y[rows]
            if len(x) < 2:
                return
        with torch.random.fork_rng([x.device] if x.is_cuda else []):  # keeps the main training's random numbers
            losses = [strategy._criterion(shadow.logits(x), y) for shadow in now.shadows.values()]
        strategy.loss = strategy.loss + sum(losses) / len(losses)

    def learned_by_backward(self) -> list[Tensor]:
        """Return the parameters of all shadows (weight copies); in distributed training, their gradients are summed."""
        return [] if self._now is None else [p for shadow in self._now.shadows.values() for p in shadow.parameters]

    def after_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the main optimizer step: take an optimizer step for each shadow (weight copy)."""
        for shadow in () if self._now is None else self._now.shadows.values():
            shadow.step()

    @torch.no_grad()
    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """After a task's training: for each earlier task, store what its shadow learned at entries both tasks use."""
        self.kept = {
            later: {other: backup for other, backup in of_task.items() if other in unlearnable}
            for later, of_task in self.kept.items()
        }
        self.kept[task] = {}
        if self._now is None:
            return
        mine = entries_in_use(strategy.model, task)
        for other, shadow in self._now.shadows.items():
            if other in unlearnable and shadow.settle():
                self._now.statistics.recompute(running_norms(shadow.parts), shadow.masked_features)
                parts = {name: value.clone() for name, value in shadow.parts.state_dict().items()}
                both = {name: mine[name] & used for name, used in entries_in_use(strategy.model, other).items()}
                self.kept[task][other] = Backup(shadow.learned_change(both), parts)
        self.undo_training(strategy)

    def undo_training(self, strategy: Strategy) -> None:
        """Undo an unfinished training: delete the shadows (weight copies) of the task in training."""
        self._now = None

    def covers(self, task: int, removed: Collection[int]) -> bool:
        """Return True if a stored shadow (weight copy) learned ``task`` without one of the ``removed`` tasks."""
        return not self.kept.get(task, {}).keys().isdisjoint(removed)

    def revise(self, model: MaskedModel, trajectory: Trajectory, removed: Collection[int]) -> Revisions:
        """Return replacements for recorded updates: by task, what weight copies learned without a ``removed`` task."""
        return {
            task: {
                f"backbone.{name}": Revision(part.where, factor=0.0, added=part.values.double(), alone=True)
                for name, part in of_task.items()
            }
            for task, of_task in self._newest_updates(trajectory.tasks, removed).items()
        }

    def _newest_updates(self, tasks: Sequence[int], removed: Collection[int]) -> dict[int, dict[str, SparseValues]]:
        """Return the shadows' updates by task and parameter name; for each weight, keep only the last task's update."""
        affected = [task for task in tasks if task in self.kept and task not in removed]
        taken: dict[str, Tensor] = {}
        result: dict[int, dict[str, SparseValues]] = {}
        for task in reversed(affected):
            for name, part in self._updates_without(task, removed).items():
                where = part.where & ~taken.get(name, torch.zeros_like(part.where))
                taken[name] = where | taken.get(name, where)
                if bool(where.any()):
                    result.setdefault(task, {})[name] = part.restrict(where.reshape(-1))
        return result

    def _updates_without(self, task: int, removed: Collection[int]) -> dict[str, SparseValues]:
        """Return, by parameter name, updates that weight copies without a ``removed`` task learned in ``task``."""
        result: dict[str, SparseValues] = {}
        of_task = self.kept.get(task, {})
        for part_of in (of_task[other].updates for other in removed if other in of_task):
            for name, part in part_of.items():
                index = part.where.reshape(-1).nonzero()[:, 0]
                result[name] = result[name].extend(index, part.values) if name in result else part
        return result

    @torch.no_grad()
    def compensate(self, model: MaskedModel, tasks: Sequence[int], removal: Removal, change: Transaction) -> list[str]:
        """Give affected tasks the norms that weight copies learned without ``tasks``; delete backups of ``tasks``."""
        change.keep(self, "kept", "_now")
        lines, changed = [], {name: moved.where for name, moved in removal.changed.items()}
        for task, of_task in self.kept.items():
            lost = [other for other in of_task if other in tasks]  # in training order
            if task in tasks or not lost or not model.users_of(changed, [task]):
                continue
            own = model.task_parts(task)
            state = {} if own is None else own.state_dict()
            for name, value in of_task[lost[-1]].parts.items():
                change.write(state[name], value)
            lines.append(f"task {task}: shadows of tasks {lost} put in their place")
        self.kept = {
            task: {other: backup for other, backup in of_task.items() if other not in tasks}
            for task, of_task in self.kept.items()
            if task not in tasks
        }
        self._now = None  # the shadows of a task in training have learned from the values before this unlearning
        return lines


def _required_parts(strategy: Strategy) -> tuple[MaskedModel, HATPlugin, TrajectoryPlugin]:
    if not isinstance(strategy.model, MaskedModel):
        raise TypeError(f"shadow copies are of masked units: give a MaskedModel, got {type(strategy.model).__name__}")
    return strategy.model, *method_plugins(strategy, "BackupPlugin()")
