"""Multi-head model with separate norms per task, for BatchNorm backbones in strategies without masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel, run_by_task
from avalanche_amnesia.models.substitutes import TaskCopies, norms_of
from avalanche_amnesia.unit_graph.backbones import run_backbone
from avalanche_amnesia.unit_graph.task_owned import OwnModules


class TaskNormModel(MultiHeadModel):
    """Multi-head model in which every task has its own norms: parameters and running statistics.

    They are copies of the backbone's norms, created with the task's head, stored in it (``heads.0.own``), and removed
    with it. Only the training of their own task changes their statistics. In another task's training (on replayed
    samples, or for a distilled head) they use their stored statistics, as in evaluation. So an unlearned task leaves no
    trace in them. A task without a head runs through the backbone's original norms.

    For a backbone without norms this is a plain :class:`MultiHeadModel`.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``. Each task gets its own BatchNorm, InstanceNorm,
            LayerNorm, GroupNorm and RMSNorm modules. Nothing is traced, so ``forward`` may be any code.
        n_features: width of the features; by default ``backbone.features``, or the width found by running the backbone.

    Raises:
        ModelError: if the width of the features is unknown, or the module can't be used as a backbone.
        TypeError: if the backbone is no module.

    Reference: task-owned norms: Duan, HAT-CL, 2023.
    """

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__(backbone, n_features)
        self._copies = TaskCopies(backbone, norms_of(backbone))
        self.features_per_task = bool(self._copies.norms)

    def fresh_parts(self) -> OwnModules | None:
        """Return copies of the backbone's norms for a new task; None if the backbone has none."""
        return self._copies.make_copies()

    def features(self, x: Tensor, task: int | Tensor) -> Tensor:
        """Return features ``(batch, features)`` with the norms of one task, or of each sample's task ``(batch,)``."""
        return run_by_task(x, task, lambda samples, label: self.features_through(samples, self.task_parts(label)))

    def features_through(self, x: Tensor, norms: OwnModules | None) -> Tensor:
        """Return features ``(batch, features)`` with a task's present or past ``norms``; None: the backbone's norms."""
        # A teacher (LwF) is a copy in training mode that runs without gradients: its statistics must not change.
        with self._copies.substitute(norms, learns=False, norms_learn=torch.is_grad_enabled()):
            return run_backbone(self.backbone, x)
