"""Records what every task changed, on any Avalanche strategy."""

from __future__ import annotations

from typing import Any

from avalanche.core import SupervisedPlugin

from avalanche_amnesia.models import ModelError
from avalanche_amnesia.training.plugins.lookup import find_plugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin, single_task
from avalanche_amnesia.training.snapshot import TaskSnapshot
from avalanche_amnesia.unlearning import RequestError, Trajectory, own_parameters, shared_statistics


class TrajectoryPlugin(SupervisedPlugin):
    """Records the update of every task in a :class:`~avalanche_amnesia.unlearning.Trajectory`.

    Works with the masked strategies (where an update is sparse, because it is committed to the mask) and with stock
    ones (where it is dense). A training that was interrupted is undone before the next one.

    Attributes:
        trajectory: the store.
        snapshot: values before the task in training; None between tasks.

    Raises:
        ModelError: before a training, if the model keeps running statistics that all tasks share (BatchNorm): they
            can't be taken apart again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trajectory = Trajectory()
        self.snapshot: TaskSnapshot | None = None

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Check the task and the model, and undo a training that was interrupted."""
        task = single_task(strategy.experience)
        if task in self.trajectory.tasks:
            raise RequestError(
                f"task {task} is already trained and remains recorded; recorded tasks: {list(self.trajectory.tasks)}. "
                "Unlearn it first, or give the new data a task label of its own"
            )
        shared = shared_statistics(strategy.model)
        if shared:
            raise ModelError(
                f"modules {shared} keep running statistics that all tasks share, which no unlearning can take apart; "
                "use a backbone without them, track_running_stats=False, or a MaskedModel, where each task has its own"
            )
        self.abort(strategy)

    def abort(self, strategy: Any) -> None:
        """Undo a task whose training was interrupted."""
        if self.snapshot is not None:
            self.snapshot.restore(strategy.model)
            self.snapshot = None

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Remember the values before the task."""
        masking = find_plugin(strategy, TaskMaskPlugin)
        if masking is None:
            self.snapshot = TaskSnapshot(strategy.model, single_task(strategy.experience))
        else:
            if masking.snapshot is None:
                raise ValueError(
                    f"put {type(masking).__name__} in front of TrajectoryPlugin: a task is committed, then recorded"
                )
            self.snapshot = masking.snapshot  # one copy of the model serves both

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Record the task's update of everything that is not its own."""
        assert self.snapshot is not None
        task = self.snapshot.task
        own = own_parameters(strategy.model, task)
        before = {name: value for name, value in self.snapshot.values.items() if name not in own}
        self.trajectory.record(task, before, dict(strategy.model.named_parameters()))
        self.snapshot = None
