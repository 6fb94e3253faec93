"""Models with one network per task, or a main network and one per unlearnable task; both can unlearn exactly."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.models.multi_head import MultiHeadModel, with_parts
from avalanche_amnesia.training import TrajectoryPlugin, UnlearningPlugin
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.unit_graph.backbones import run_backbone


class NetworkPerTask(MultiHeadModel):
    """Model with one network and one head per task, so that deleting both removes every change the task made.

    Each network starts as a copy of the backbone. The backbone itself is never trained; the model runs it for unknown
    tasks.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``. All its buffers become persistent.
        n_features: width of the features; by default ``backbone.features``, if it is an integer.

    Raises:
        ModelError: if the width of the features is unknown.
    """

    features_per_task = True
    state_per_task = True
    isolates = True
    trains_again = True

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__(backbone, n_features)
        for module in self.backbone.modules():  # no buffer is left out of states and proofs
            module._non_persistent_buffers_set = set()

    def network(self, task: int) -> nn.Module:
        """Return the network of ``task``, or the backbone if the task has no network."""
        own: nn.Module | None = self.task_parts(task)
        return self.backbone if own is None else own

    def begins_as(self, name: str) -> str:
        """Return the name of the backbone's parameter that initialises ``name``, a parameter of a task's network."""
        return re.sub(r"^heads\.\d+\.own\.", "backbone.", name)

    def fresh_parts(self) -> nn.Module:
        """Return the initial network of a new task: a copy of the backbone."""
        return deepcopy(self.backbone)

    def _features(self, x: Tensor, task: int) -> Tensor:
        return run_backbone(self.network(task), x)


class SideNetworks(NetworkPerTask):
    """Model with a main network for tasks never to be unlearned, and a side network for each task that may be.

    A side network starts as a copy of the main network. Unknown tasks run through the main network.

    Arguments and errors are those of :class:`NetworkPerTask`; ``backbone`` is the main network.
    """

    trains_again = False  # the main network may have changed, so a new side network would start from other values

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__(backbone, n_features)
        self._merged_late: Tensor
        self.register_buffer("_merged_late", torch.tensor(False))

    @property
    def isolates(self) -> bool:  # type: ignore[override]
        """Return True while no side network was merged: until then, no task depends on a task that can be unlearned."""
        # The time of a merge depends on all trained tasks: a model retrained without some of them would differ.
        return not bool(self._merged_late)

    @property
    def main_tasks(self) -> tuple[int, ...]:
        """Return the tasks without a side network, which run through the main network."""
        return tuple(task for task in self.tasks if self.task_parts(task) is None)

    def adaptation(self, experience: Any) -> None:
        """Add a head for each new task of an experience, and a side network unless the experience is permanent."""
        new = {int(task) for task in experience.task_labels} - set(self.tasks)
        super().adaptation(experience)
        if self.training and getattr(experience, "permanent", False):
            for task in new:
                self.store_task(task, with_parts(self.heads[task], None))

    def drop_network(self, task: int) -> None:
        """Delete a task's side network, so that the task runs through the main network from now on."""
        self.store_task(task, with_parts(self.heads[task], None))
        self._merged_late = torch.ones_like(self._merged_late)

    def parts_for(self, saved: Mapping[str, Tensor]) -> nn.Module | None:
        """Return a new side network, to load the tensors ``saved``; None (main network in use) if there are none."""
        return self.fresh_parts() if saved else None


class Independent(TaskStrategy):
    """Strategy that trains a separate network for every task. Unlearning deletes a task's network, and is exact.

    Args:
        model: a :class:`NetworkPerTask`.
        optimizer: any torch optimizer over ``model.parameters()``.
        unlearning: settings of the unlearning, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: every random draw derives from it and the task.
        options: ``reset_optimizer`` and Avalanche's own options, see :class:`TaskStrategy`.

    Raises:
        TypeError: if ``model`` is not a :class:`NetworkPerTask`, or for an unknown option.
    """

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
        super().__init__(model=model, optimizer=optimizer, method=[TrajectoryPlugin(), obeying], seed=seed, **options)
