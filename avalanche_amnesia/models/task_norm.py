"""A multi-head model whose norms are each task's own: BatchNorm backbones for strategies without masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel, by_task
from avalanche_amnesia.models.substitutes import NormCopies, Substitutes, norms_of
from avalanche_amnesia.unit_graph.backbones import run_on
from avalanche_amnesia.unit_graph.task_owned import OwnModules


class TaskNormModel(MultiHeadModel):
    """A multi-head model in which every task has its own norms: parameters and running statistics.

    They are made with the task's head from the backbone's, lie in it (``heads.0.norms``), and are removed with it. Only
    a training of their task changes their statistics: where another task's training runs them (on replayed samples, for
    a head that is distilled), they go by the statistics they have, as in evaluation. So a task that was unlearned has
    left nothing in them. What a task without a head runs through are the backbone's own norms, as they were given.

    Without norms in the backbone it is a :class:`MultiHeadModel`.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``. BatchNorm, InstanceNorm, LayerNorm, GroupNorm
            and RMSNorm modules are each task's own; nothing is traced, so that its ``forward`` may be anything.
        n_features: width of the features; by default ``backbone.features``, where that is an integer.

    Raises:
        ModelError: if the width of the features is not known, or the backbone is none.
        TypeError: for a backbone that is no module.

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
        """As the base class's; with the task's norms in it."""
        super().add_head(task, n_classes)
        copies = dict(zip(self._names, self._copies.begun(), strict=True))
        norms = OwnModules(copies)
        norms.learn(False, self.training)
        # In the head, not in a container beside it: parameters are then appended to the model's, as hosts expect that
        # go through old and new ones side by side (EWC's mode "online").
        self.heads[task].add_module("norms", norms)

    def task_norms(self, task: int) -> OwnModules | None:
        """Norms of a task; None where it has no head."""
        norms = getattr(self.heads[task], "norms", None) if task in self.heads else None
        return norms if isinstance(norms, OwnModules) else None

    def adaptation(self, experience: Any) -> None:
        """As the base class's; in a training only the statistics of its own tasks' norms learn."""
        super().adaptation(experience)
        if self.training:
            labels = {int(task) for task in experience.task_labels}
            for task in self.tasks:
                norms = self.task_norms(task)
                if norms is not None:
                    norms.learn(task in labels, True)

    def train(self, mode: bool = True) -> TaskNormModel:
        """As ``nn.Module``'s; the norms that were given never learn."""
        super().train(mode)
        self._copies.hold()
        return self

    def features(self, x: Tensor, task: int | Tensor) -> Tensor:
        """Features ``(batch, features)`` through a task's norms; one label, or one per sample ``(batch,)``."""
        return by_task(x, task, lambda samples, label: self.features_through(samples, self.task_norms(label)))

    def features_through(self, x: Tensor, norms: OwnModules | None) -> Tensor:
        """Features ``(batch, features)`` through norms that a task has, or had; None: those that were given."""
        # A teacher (LwF) is a copy in training mode that runs without gradients: it must stay as it was copied.
        others = self._copies.standing_in(() if norms is None else norms.values(), learn=torch.is_grad_enabled())
        with self._substitutes.put(others):
            features: Tensor = run_on(self.backbone, x)
        return features
