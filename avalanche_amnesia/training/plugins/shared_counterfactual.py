"""Counterfactual columns: what :class:`CounterfactualPlugin` does, for a head that all tasks share."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

from avalanche_amnesia.models import MaskedModel, TaskMaskedModel
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin, FittedHead
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.unlearning import Trajectory
from avalanche_amnesia.unlearning.logistic import fit_correction


class SharedHeadCounterfactualPlugin(CounterfactualPlugin):
    """Fits the columns of the shared head that a task alone trained, for every world without some earlier tasks.

    A column belongs to the task that first opened its unit; later tasks read it and never change it (under
    ``adjust="update"``). In a world without some tasks the other columns are as they would be there: those of unlearned
    tasks at their initial values, those of earlier tasks refitted for that world. The task's own are fitted beside
    them, as a small change, since later tasks read them too. So every column keeps one owner, and a task that is
    unlearned later takes its refitted columns with it. A column that several remaining tasks have written is left
    alone; where a task has none of its own nothing is fitted.

    Args:
        options: those of :class:`CounterfactualPlugin`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._trajectory: Trajectory | None = None

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Check the model."""
        super().before_training_exp(strategy, **kwargs)
        model = strategy.model
        if not isinstance(model, MaskedModel) or model.shared_head is None:
            raise TypeError(
                f"{type(self).__name__} refits a shared head, which this {type(model).__name__} does not have: use "
                "MaskedModel(backbone, shared_head=classes), or CounterfactualPlugin()"
            )
        recorder = next((p for p in strategy.plugins if isinstance(p, TrajectoryPlugin)), None)
        self._trajectory = None if recorder is None else recorder.trajectory

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """As the base class's, while nobody else who remains has written the task's columns."""
        return super().covers(task, gone) and self._owns(task, self.heads[task][self.sources[task] & set(gone)], gone)

    def _owns(self, task: int, head: FittedHead, gone: Collection[int]) -> bool:
        assert self._trajectory is not None
        assert head.columns is not None
        columns = head.columns
        others = [t for t in self._trajectory.tasks if t != task and t not in gone]
        moved = (self._trajectory.moved(other).get(_WEIGHT) for other in others)
        return not any(where is not None and bool(where[:, columns.cpu()].any()) for where in moved)

    def _world(
        self, model: TaskMaskedModel, trajectory: Trajectory, gone: Collection[int]
    ) -> AbstractContextManager[None]:
        return self._refitted(model, trajectory, gone)

    @contextmanager
    def _refitted(self, model: TaskMaskedModel, trajectory: Trajectory, gone: Collection[int]) -> Iterator[None]:
        with super()._world(model, trajectory, gone), ExitStack() as undo:
            for task, heads in self.heads.items():
                lost = self.sources[task] & frozenset(gone)
                if task not in gone and lost in heads and self._owns(task, heads[lost], gone):
                    for tensor, value in self._places(model, task, heads[lost]):
                        undo.callback(tensor.copy_, tensor.clone())
                        tensor.copy_(value)
            yield

    def _fit(self, model: TaskMaskedModel, task: int, features: Tensor, y: Tensor) -> FittedHead | None:
        weight = _weight(model)
        use = {t: model.graph.parameter_use(mask)[_NAME][0] > 0 for t, mask in model.masks.items()}
        columns = use[task].clone()
        for other, used in use.items():
            if other != task:
                columns &= ~used
        if not bool(columns.any()):
            return None
        correction = fit_correction(features[:, columns], y, features @ weight.T)
        return FittedHead(weight[:, columns] + correction, columns=columns)

    def _places(self, model: TaskMaskedModel, task: int, fitted: FittedHead) -> Iterator[tuple[Tensor, Tensor]]:
        weight = _weight(model).data
        value = weight.clone()
        value[:, fitted.columns] = fitted.weight
        yield weight, value


_NAME = "_shared_head.weight"
_WEIGHT = f"backbone.{_NAME}"


def _weight(model: TaskMaskedModel) -> Tensor:
    assert isinstance(model, MaskedModel)
    assert model.shared_head is not None
    return model.shared_head.weight
