"""Multi-head model with separate norms per task, for BatchNorm backbones in strategies without masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel, by_task
from avalanche_amnesia.models.substitutes import NormCopies, Substitutes, norms_of
from avalanche_amnesia.unit_graph.backbones import run_on
from avalanche_amnesia.unit_graph.task_owned import OwnModules


class TaskNormModel(MultiHeadModel):
    """Multi-head model in which every task has its own norms: parameters and running statistics.

    They are copies of the backbone's norms, created with the task's head, stored in it (``heads.0.norms``), and removed
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
        found = norms_of(backbone)
        self.features_per_task = bool(found)
        self._names = list(found)
        self._copies = NormCopies(list(found.values()))
        self._substitutes = Substitutes()
        self.train(self.training)

    def add_head(self, task: int, n_classes: int) -> None:
        """Add a randomly initialised head for a task, with the task's norms in it."""
        super().add_head(task, n_classes)
        copies = dict(zip(self._names, self._copies.begun(), strict=True))
        norms = OwnModules(copies)
        norms.learn(False, self.training)
        # In the head, not in a separate container, so that new parameters come last in the model. Strategies that
        # compare old and new parameters in order expect this (EWC's mode "online").
        self.heads[task].add_module("norms", norms)

    def task_norms(self, task: int) -> OwnModules | None:
        """Return the norms of a task, or None if it has no head."""
        norms = getattr(self.heads[task], "norms", None) if task in self.heads else None
        return norms if isinstance(norms, OwnModules) else None

    def adaptation(self, experience: Any) -> None:
        """Create the heads of new tasks; in training mode, let only this experience's tasks update their norms."""
        super().adaptation(experience)
        if self.training:
            labels = {int(task) for task in experience.task_labels}
            for task in self.tasks:
                norms = self.task_norms(task)
                if norms is not None:
                    norms.learn(task in labels, True)

    def train(self, mode: bool = True) -> TaskNormModel:
        """Set the mode like ``nn.Module.train``, but keep the original norms in evaluation mode."""
        super().train(mode)
        self._copies.hold()
        return self

    def features(self, x: Tensor, task: int | Tensor) -> Tensor:
        """Return features ``(batch, features)`` through the norms of one task, or of one per sample ``(batch,)``."""
        return by_task(x, task, lambda samples, label: self.features_through(samples, self.task_norms(label)))

    def features_through(self, x: Tensor, norms: OwnModules | None) -> Tensor:
        """Return features ``(batch, features)`` through a task's present or former norms; None: the original norms."""
        # A teacher (LwF) is a copy in training mode that runs without gradients: its statistics must not change.
        others = self._copies.standing_in(() if norms is None else norms.values(), learn=torch.is_grad_enabled())
        with self._substitutes.put(others):
            features: Tensor = run_on(self.backbone, x)
        return features
