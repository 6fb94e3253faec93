"""Shadow copies that learn later tasks in the place of tasks that may be unlearned (``compensation="backup"``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import inside_backbone, single_task
from avalanche_amnesia.saving.classes import saveable
from avalanche_amnesia.training.first_use import entries_in_use, first_used
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.norm_statistics import TaskStatistics
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.shadow import Shadow
from avalanche_amnesia.trajectory.entries import take
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.trajectory.revision import Revision, Revisions
from avalanche_amnesia.trajectory.sparse import SparseValues
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction

ShadowStart = Literal["before", "delete"]
ShadowOrder = Literal["oldest", "newest"]


@saveable
@dataclass(frozen=True)
class Backup:
    """Updates and norms that a task learned in the place of an earlier one.

    Attributes:
        updates: parameter name in the backbone → updates of the entries that stand in for the earlier task's.
        parts: of the task's own modules (norms), by name in their state.
    """

    updates: Mapping[str, SparseValues]
    parts: Mapping[str, Tensor]


@dataclass(frozen=True)
class _ShadowedTask:
    """Shadows of the task in training.

    Attributes:
        recorder: of the trajectory, whose snapshot has the values before the task.
        statistics: of the task's samples, for the shadows' norms.
        shadows: earlier task → the shadow that learns as if it were not there.
    """

    recorder: TrajectoryPlugin
    statistics: TaskStatistics
    shadows: dict[int, Shadow] = field(default_factory=dict)

    @property
    def values_before(self) -> Mapping[str, Tensor]:
        """Values before the task; none of a task whose training has not begun."""
        snapshot = self.recorder.snapshot
        return {} if snapshot is None else snapshot.values

    def backups(self, unlearnable: Collection[int], use: Mapping[str, Tensor]) -> Iterator[tuple[int, Backup]]:
        """Earlier tasks that may be unlearned, with what their shadows learned that differs from the task itself.

        Args:
            unlearnable: tasks that may be unlearned.
            use: entries that the task uses, by name in the backbone.
        """
        for other, shadow in self.shadows.items():
            if other in unlearnable and shadow.settle():
                self.statistics.retake_for(shadow.parts, shadow.masked_features)
                parts = {name: value.clone() for name, value in shadow.parts.state_dict().items()}
                yield other, Backup(shadow.update(use), parts)

    def without(self, gone: Collection[int]) -> _ShadowedTask:
        """The same without the shadows of tasks that are gone."""
        return replace(self, shadows={other: s for other, s in self.shadows.items() if other not in gone})


class BackupPlugin(SupervisedPlugin):
    """Trains shadows beside a task: for each earlier task that may be unlearned one that learns without it.

    Tasks from which it is isolated (``isolation="pools"``) need none.

    A shadow owns the entries that the earlier task was the first to use: nothing is ever written into what tasks
    before it own. Its cross-entropy, through the head and the mask of the task in training, is added to the loss
    (mean over the shadows). When the task ends, what the shadow learned is kept where both tasks' masks overlap; an
    unlearning of the earlier task puts it there, as the later task's own update, and replaces that task's norms by
    the shadow's. Shadows of tasks that became permanent, or are gone, are dropped.

    Needs :class:`HATPlugin` (or AdaHATPlugin) and :class:`TrajectoryPlugin` in front of it, and
    :class:`UnlearningPlugin` beside it. Where an unlearning names several tasks, a task's norms are those of the
    shadow of the last trained of them.

    Args:
        start: where the shadow's entries begin: at the state ``before`` the earlier task, or at the current state
            minus its update (``delete``). With ``adjustment="hat"`` the two are the same: nobody else writes there.
        order: in which the affected tasks' entries are written over one another: ``oldest`` first, so that the newest
            task's stay where several overlap, or ``newest`` first.
        joint: let the shadows' loss train the main weights, the head and the mask as well, as published. By default
            it trains the shadows alone, and the main training is what it would be without them, bit for bit.

    Attributes:
        kept: task → earlier task → :class:`Backup`.

    Raises:
        ValueError: for a value that is not allowed, or where a plugin that it needs is missing.
        TypeError: before a training, if the model is no :class:`MaskedModel`.
    """

    def __init__(self, *, start: ShadowStart = "before", order: ShadowOrder = "oldest", joint: bool = False) -> None:
        super().__init__()
        checks.one_of("start", start, ShadowStart)
        checks.one_of("order", order, ShadowOrder)
        self.start, self.order, self.joint = start, order, joint
        self.kept: dict[int, dict[int, Backup]] = {}
        self._now: _ShadowedTask | None = None

    # While a task trains --------------------------------------------------------------------------------------

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Check the model and the plugins beside it, before anything of the task is made."""
        _surroundings(strategy)

    @torch.no_grad()
    def begin(self, strategy: Any, task: int, unlearnable: Collection[int]) -> None:
        """Make a shadow of every earlier task that may be unlearned."""
        self.undo_training(strategy)
        model, masking, recorder = _surroundings(strategy)
        trajectory = recorder.trajectory
        self._now = _ShadowedTask(recorder, TaskStatistics(model, task, masking.masks.statistics_batches))
        values = {name: p.detach() for name, p in model.backbone.named_parameters(prefix="backbone")}
        inside_values = inside_backbone(values)
        seen = [other for other in unlearnable if masking.influences is None or other in masking.influences]
        for other in seen:  # a task that this one is isolated from takes nothing with it when it goes
            earlier = trajectory.tasks[: trajectory.tasks.index(other)]
            region = first_used(model, other, earlier)
            written = inside_backbone(trajectory.remove([other], values).updates[other])
            offset = {
                name: torch.where(inside, 0.0, written[name].to(inside_values[name]))
                for name, inside in region.items()
                if name in written
            }
            offset = {name: outside for name, outside in offset.items() if bool((outside != 0).any())}
            region = {name: inside for name, inside in region.items() if bool(inside.any()) or name in offset}
            if any(bool(inside.any()) for inside in region.values()):
                start = self._start_values(trajectory, other, values)
                self._now.shadows[other] = Shadow(
                    model, task, region, start, offset, strategy.optimizer, joint=self.joint
                )

    def _start_values(self, trajectory: Trajectory, other: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.start == "before":
            result = trajectory.values_before(other, values)
        else:
            result = {**values, **trajectory.remove([other], values).values}
        return inside_backbone(result)

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Run the shadows and add their loss; the random streams stay as the main network left them."""
        now = self._now
        if now is None or not now.shadows:
            return
        task, x, y = now.statistics.task, strategy.mb_x, strategy.mb_y
        now.statistics.see(x, strategy.mb_task_id)
        if single_task(strategy.mb_task_id) != task:  # replayed samples of other tasks train the main network alone
            rows = strategy.mb_task_id == task
            x, y = x[rows], y[rows]
            if len(x) < 2:
                return
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            losses = [strategy._criterion(shadow.logits(x), y) for shadow in now.shadows.values()]
        strategy.loss = strategy.loss + sum(losses) / len(losses)

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Step the shadows."""
        for shadow in () if self._now is None else self._now.shadows.values():
            shadow.step()

    @torch.no_grad()
    def prepare(self, strategy: Any, task: int, unlearnable: Collection[int]) -> None:
        """Keep what the shadows learned of the task that has just been trained."""
        self.kept = {
            later: {other: backup for other, backup in of_task.items() if other in unlearnable}
            for later, of_task in self.kept.items()
        }
        use = entries_in_use(strategy.model, task)
        self.kept[task] = {} if self._now is None else dict(self._now.backups(unlearnable, use))
        self.undo_training(strategy)

    def undo_training(self, strategy: Any) -> None:
        """Drop the shadows of the task in training."""
        self._now = None

    # As a compensation ----------------------------------------------------------------------------------------

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """Tell whether the task was learned in the place of one of these."""
        return not self.kept.get(task, {}).keys().isdisjoint(gone)

    def revise(self, model: MaskedModel, trajectory: Trajectory, gone: Collection[int]) -> Revisions:
        """Updates that the shadows learned, in the place of the tasks' own; every entry is one task's."""
        affected = [task for task in trajectory.tasks if task in self.kept and task not in gone]
        taken: dict[str, Tensor] = {}
        result: dict[int, dict[str, Revision]] = {}
        for task in affected if self.order == "newest" else reversed(affected):
            for name, parts in _by_name(self.kept[task][other].updates for other in gone if other in self.kept[task]):
                learned = torch.zeros(parts[0].shape, dtype=torch.float64)
                where = torch.zeros(parts[0].shape, dtype=torch.bool)
                for part in parts:
                    learned[part.where] = part.values.double()
                    where |= part.where
                where &= ~taken.get(name, torch.zeros_like(where))
                taken[name] = where | taken.get(name, where)
                if bool(where.any()):
                    revision = Revision(where, factor=0.0, added=learned[where], alone=self.start == "before")
                    result.setdefault(task, {})[f"backbone.{name}"] = revision
        return result

    @torch.no_grad()
    def compensate(self, model: MaskedModel, gone: Collection[int], removal: Removal, change: Transaction) -> list[str]:
        """Put the shadows' norms in place, and drop whatever stands in for the tasks that go, or belongs to them."""
        change.keep(self, "kept", "_now")
        lines = []
        for task, of_task in self.kept.items():
            lost = [other for other in of_task if other in gone]  # in training order
            if task in gone or not lost or not _reads(model, task, removal):
                continue
            own = model.task_parts(task)
            state = {} if own is None else own.state_dict()
            for name, value in of_task[lost[-1]].parts.items():
                change.write(state[name], value)
            lines.append(f"task {task}: shadows of tasks {lost} put in their place")
        self.kept = {
            task: {other: backup for other, backup in of_task.items() if other not in gone}
            for task, of_task in self.kept.items()
            if task not in gone
        }
        if self._now is not None:
            self._now = self._now.without(gone)
            values = {n: v for n, v in self._now.values_before.items() if n.startswith("backbone.")}
            for other, shadow in self._now.shadows.items():
                shadow.start_from(self._start_values(self._now.recorder.trajectory, other, values), change)
        return lines


def _surroundings(strategy: Any) -> tuple[MaskedModel, HATPlugin, TrajectoryPlugin]:
    if not isinstance(strategy.model, MaskedModel):
        raise TypeError(
            f"shadow copies need a MaskedModel, got {type(strategy.model).__name__}: they stand in for units, where "
            "the masks of two tasks overlap"
        )
    masking, recorder = find_plugin(strategy, HATPlugin), find_plugin(strategy, TrajectoryPlugin)
    if masking is None or recorder is None:
        raise ValueError(
            "BackupPlugin() needs HATPlugin() and TrajectoryPlugin() in front of it: AmnesiacHAT(compensation='backup')"
        )
    return strategy.model, masking, recorder


def _reads(model: MaskedModel, task: int, removal: Removal) -> bool:
    """Tell whether a removal changes an entry that the task uses."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    use = ((name, used.expand(shapes[name])) for name, used in model.entries_of(task) if name in removal.moved)
    return any(bool(take(used, removal.moved[name]).any()) for name, used in use)


def _by_name(several: Iterable[Mapping[str, SparseValues]]) -> list[tuple[str, list[SparseValues]]]:
    result: dict[str, list[SparseValues]] = {}
    for updates in several:
        for name, entries in updates.items():
            result.setdefault(name, []).append(entries)
    return list(result.items())
