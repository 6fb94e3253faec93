"""Independent: a network per task, the upper bound of unlearning at T times the size."""

from typing import ClassVar, Unpack

from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.contrib.baselines.networks import NetworkPerTask
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy, check_model


class Independent(TaskStrategy):
    """Every task trains a network of its own; unlearning a task deletes it, which is exact.

    Args:
        model: a :class:`NetworkPerTask`.
        optimizer: any torch optimizer over ``model.parameters()``.
        unlearning: how requests are obeyed, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: every draw derives from it and the task.
        options: ``reset_optimizer`` and Avalanche's own, as of :class:`TaskStrategy`.

    Raises:
        TypeError: if ``model`` is of another kind, or for an unknown option.
    """

    settings: ClassVar = {"unlearning": UnlearningPlugin}

    def __init__(
        self,
        *,
        model: NetworkPerTask,
        optimizer: Optimizer,
        unlearning: UnlearningPlugin | None = None,
        seed: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        check_model(model, NetworkPerTask)
        obeying = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        super().__init__(
            model=model,
            optimizer=optimizer,
            method=[TrajectoryPlugin(), obeying],
            seed=seed,
            **options,
        )
