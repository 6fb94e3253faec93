"""A network of its own for every task, the upper bound of unlearning at T times the size, or for some."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_store import TaskModules
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.unit_graph.backbones import run_on


class NetworkPerTask(MultiHeadModel):
    """One network and one head per task; a task that goes takes all that it ever changed with it.

    Each network is a copy of the backbone as it was given, which no task trains and which stands in for tasks that the
    model does not have.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``.
        n_features: width of the features; by default ``backbone.features``, where that is an integer.

    Raises:
        ModelError: if the width of the features is not known.
    """

    task_containers = ("heads", "networks")
    features_per_task = True
    state_per_task = True
    isolates = True
    trains_again = True

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__(backbone, n_features)
        self.networks = TaskModules()

    def network(self, task: int) -> nn.Module:
        """The network that a task runs through: its own, or the one that was given."""
        network: nn.Module = self.networks.get(task, self.backbone)
        return network

    def add_head(self, task: int, n_classes: int) -> None:
        """Add a freshly drawn head for a task, and a copy of the backbone."""
        super().add_head(task, n_classes)
        self.networks[task] = deepcopy(self.backbone)

    def _features(self, x: Tensor, task: int) -> Tensor:
        return run_on(self.network(task), x)


class SideNetworks(NetworkPerTask):
    """A main network for permanent tasks, and a side network for each task that may be unlearned.

    A side network begins as a copy of the main one. The main one stands in for tasks that the model does not have.

    Arguments and errors are those of :class:`NetworkPerTask`; ``backbone`` is the main network.
    """

    trains_again = False  # the main network, with which a side network begins, may be another one by then

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__(backbone, n_features)
        self._merged_late: Tensor
        self.register_buffer("_merged_late", torch.tensor(False))

    @property
    def isolates(self) -> bool:  # type: ignore[override]
        """As the base class's; no longer once a task that had a side network was merged into the main one."""
        # When that happens depends on all tasks that were trained: a model retrained without some of them would differ.
        return not bool(self._merged_late)

    @property
    def main_tasks(self) -> tuple[int, ...]:
        """Tasks that run through the main network."""
        return tuple(task for task in self.tasks if task not in self.networks)

    def adaptation(self, experience: Any) -> None:
        """As the base class's; a task that is permanent from the start gets no side network."""
        new = {int(task) for task in experience.task_labels} - set(self.tasks)
        super().adaptation(experience)
        if self.training and getattr(experience, "permanent", False):
            for task in new:
                self.networks.drop(task)

    def drop_network(self, task: int) -> None:
        """Let a task that had a side network run through the main one from now on."""
        self.networks.drop(task)
        self._merged_late = torch.ones_like(self._merged_late)

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        super()._match_tasks(state)
        for task in self.tasks:
            has_network = any(name.startswith(f"networks.{task}.") for name in state)
            if not has_network:
                self.networks.drop(task)
            elif task not in self.networks:
                self.networks[task] = deepcopy(self.backbone)


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
