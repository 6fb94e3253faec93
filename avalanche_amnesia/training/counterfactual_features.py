"""Features of a task's samples, under one set of removed tasks after another."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.training.norm_statistics import retake, running_norms

STATISTICS_BATCHES = 16
"""Mini-batches from which running statistics are taken again."""
BATCH, BATCH_OF_LARGE = 512, 32
"""Samples at a time: what a large network makes of more than a few images leaves the caches of a CPU."""
LARGE = 1e10
"""Products of a weight and an input in a pass over all samples from which on a network counts as large."""


class CounterfactualFeatures:
    """Features of a task's samples, and running statistics of its norms, by the backbone as it is when called.

    Of what the task's mask closes nothing is computed.
    """

    def __init__(self, model: TaskMaskedModel, task: int, x: Tensor, mb_size: int) -> None:
        like = next(p for p in model.parameters() if p.is_floating_point())
        self.model, self.task, self.mb_size, self.device = model, task, mb_size, like.device
        self.x = x.to(like.dtype) if x.is_floating_point() else x
        self._mask = model.binary_mask(task)
        rows = self.x.is_floating_point() and self.x.dim() == 2
        weights = sum(parameter.numel() for parameter in model.backbone.parameters())
        large = 2 * weights * self.x.numel() >= LARGE  # every weight at every place: an upper bound
        self._batch = BATCH_OF_LARGE if large and not rows and like.device.type == "cpu" else BATCH

    def __call__(self) -> tuple[Tensor, dict[str, Tensor]]:
        """``(n, features)``, and statistics by name in the task's own modules; empty without running statistics."""
        parts = deepcopy(self.model.task_parts(self.task))
        norms = running_norms(parts)
        with evaluating(self.model):
            if norms:
                batches = (part.to(self.device) for part in self.x.split(self.mb_size)[:STATISTICS_BATCHES])
                retake(norms, (part for part in batches if len(part) > 1), lambda x: self._features(x, parts))
            features = torch.cat([self._features(part.to(self.device), parts) for part in self.x.split(self._batch)])
        features = features.to(torch.promote_types(features.dtype, torch.float32))  # no half can be whitened
        return features, dict(parts.named_buffers()) if parts is not None and norms else {}

    def _features(self, x: Tensor, parts: torch.nn.Module | None) -> Tensor:
        return self.model.masked_features(x, self._mask, parts)
