"""Counterfactual columns: :class:`CounterfactualPlugin` for a head that all tasks share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.head_fit import FittedHead
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction


class SharedHeadCounterfactualPlugin(CounterfactualPlugin):
    """Fits the columns of the shared head that a task would own without some earlier tasks, for every set of these.

    A column belongs to the first of the remaining tasks that open its unit; later ones read it and never change it
    (under ``space="update"``). Without some tasks, what these wrote is at its initial values, and a column
    of theirs belongs to the next task that reads it. Each task's columns are fitted when it ends, beside those of
    earlier tasks as they would be then, and as a small change, since later tasks read them too. An unlearning
    puts them in, and records that as a repair made with the task's data, in the place of the one before it: a task that
    is unlearned later takes its refitted columns with it. A column that several remaining tasks have written is left
    alone.

    Needs a :class:`TrajectoryPlugin` in front of it that merges no permanent tasks: who wrote a column must be known.

    Args:
        options: those of :class:`CounterfactualPlugin`.

    Raises:
        TypeError: before a training, if the model has no shared head.
        ValueError: before a training, without such a :class:`TrajectoryPlugin`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._store = Trajectory()
        self._masking: TaskMaskPlugin | None = None

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Check the model and the trajectory, before anything of the task is made."""
        model, recorder = strategy.model, find_plugin(strategy, TrajectoryPlugin)
        if not isinstance(model, MaskedModel) or model.shared_head is None:
            raise TypeError(
                f"{type(self).__name__} refits a shared head, which this {type(model).__name__} does not have: use "
                "MaskedModel(backbone, shared_head=classes), or CounterfactualPlugin()"
            )
        if recorder is None or recorder.merge_permanent:
            raise ValueError(
                f"{type(self).__name__} must know who wrote a column of the head, and records what it refits: put a "
                "TrajectoryPlugin() in front of it, without merge_permanent=True"
            )
        self.after_loading(strategy)

    def after_loading(self, strategy: Strategy) -> None:
        """Find the plugins beside it, whose trajectory an unlearning writes to."""
        recorder = find_plugin(strategy, TrajectoryPlugin)
        self._store = self._store if recorder is None else recorder.trajectory
        self._masking = find_plugin(strategy, TaskMaskPlugin)

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """As the base class's, while nobody else who remains has written the task's columns."""
        return super().covers(task, gone) and self._owns(task, self.heads[task][self.sources[task] & set(gone)], gone)

    def _owns(self, task: int, head: FittedHead, gone: Collection[int]) -> bool:
        assert head.columns is not None
        columns = head.columns.cpu()
        others = set(self._store.logs) - set(self._store.writers([task, *gone]))
        moved = (self._store.moved(other).get(_WEIGHT) for other in others)
        return not any(where is not None and bool(where[:, columns].any()) for where in moved)

    def _moved(self, trajectory: Trajectory, task: int) -> Mapping[str, Tensor]:
        return self._store.moved_with([task])

    def _as_if_unlearned(
        self, model: TaskMaskedModel, trajectory: Trajectory, gone: Collection[int]
    ) -> AbstractContextManager[None]:
        return self._refitted(model, trajectory, gone)

    @contextmanager
    def _refitted(self, model: TaskMaskedModel, trajectory: Trajectory, gone: Collection[int]) -> Iterator[None]:
        with super()._as_if_unlearned(model, trajectory, gone), Transaction() as change:
            for task, heads in self.heads.items():
                lost = self.sources[task] & frozenset(gone)
                if task not in gone and lost in heads and self._owns(task, heads[lost], gone):
                    for tensor, value in heads[lost].places(model, task):
                        change.write(tensor, value)
            yield

    def _kept(self, head: FittedHead) -> FittedHead:
        return head  # what the model holds must be what is recorded, and later tasks read it

    def _swap(self, model: TaskMaskedModel, task: int, fitted: FittedHead, change: Transaction) -> None:
        weight = _weight(model)
        before = self._unrepaired(model, task, change)
        super()._swap(model, task, fitted, change)
        self._store.record_repair({_WEIGHT: before}, {_WEIGHT: weight}, [task])
        snapshot = None if self._masking is None else self._masking.snapshot
        if snapshot is not None:  # another task is in training: what it does not own returns to this when it ends
            snapshot.values[_WEIGHT] = snapshot.values[_WEIGHT].clone()
            snapshot.values[_WEIGHT][:, fitted.columns] = fitted.weight

    def _unrepaired(self, model: TaskMaskedModel, task: int, change: Transaction) -> Tensor:
        """Head without the task's columns of an earlier unlearning: a task that goes now had a part in their fit."""
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        outdated = [number for number in self._store.writers([task]) if number != task]
        if not outdated:
            return parameters[_WEIGHT].clone()
        removal = self._store.remove(outdated, parameters)
        change.call(self._store.restore, self._store.logs)
        self._store.apply(removal)
        return removal.values.get(_WEIGHT, parameters[_WEIGHT]).clone()


_NAME = "_shared_head.weight"
_WEIGHT = f"backbone.{_NAME}"


def _weight(model: TaskMaskedModel) -> Tensor:
    return model.backbone.get_parameter(_NAME)
