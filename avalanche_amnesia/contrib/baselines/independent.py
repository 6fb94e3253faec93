"""Independent: a network per task, the upper bound of unlearning at T times the size."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from avalanche_amnesia.contrib.baselines.networks import NetworkPerTask
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import TaskStrategy, check_model


class Independent(TaskStrategy):
    """Every task trains a network of its own; unlearning a task deletes it, which is exact.

    Args:
        model: a :class:`NetworkPerTask`.
        optimizer: any torch optimizer over ``model.parameters()``.
        keep_probes: whether metrics may keep the heads of tasks that the stream's requests name.
        deadline: a task becomes permanent once this many further tasks have been trained; by default the stream's.
        seed: every draw derives from it and the task.
        options: those of :class:`TaskStrategy`.

    Raises:
        TypeError: if ``model`` is of another kind, or for an unknown option.
    """

    def __init__(
        self,
        *,
        model: NetworkPerTask,
        optimizer: Optimizer,
        keep_probes: bool = True,
        deadline: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_model(model, NetworkPerTask)
        super().__init__(
            model=model,
            optimizer=optimizer,
            method=[TrajectoryPlugin(), UnlearningPlugin(keep_probes=keep_probes, deadline=deadline)],
            seed=seed,
            **options,
        )
