"""Features of a task's samples, and heads fitted to them."""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.models.masked import SHARED_HEAD, MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.norm_statistics import retake, running_norms
from avalanche_amnesia.training.task_faults import input_of, training_samples
from avalanche_amnesia.unit_graph.backbones import evaluating
from avalanche_amnesia.unlearning.compensation import FittedHead
from avalanche_amnesia.unlearning.logistic import FitError, fit_correction, fit_head

MOST_SAMPLES = 20_000


def fitted_head(
    model: TaskMaskedModel,
    task: int,
    features: Tensor,
    labels: Tensor,
    gone: Collection[int] = (),
    *,
    iterations: int = 15,
) -> FittedHead | None:
    """Head of a task for these features; of a head that all tasks share, the columns that no other task reads."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))  # no half can be whitened
    shared = model.shared_head if isinstance(model, MaskedModel) else None
    if shared is None:
        held = dict(model.head(task).named_parameters())
        classes, has_bias = len(held["weight"]), "bias" in held
        weight, bias = fit_head(features, labels, classes, has_bias=has_bias, iterations=iterations)
        return FittedHead(weight, bias if has_bias else None)
    columns = _own_columns(model, task, gone)
    if not bool(columns.any()):
        return None
    before = shared.weight.detach()
    correction = fit_correction(features[:, columns], labels, features @ before.T)
    return FittedHead(before[:, columns] + correction, columns=columns)


def compacted(head: FittedHead) -> FittedHead:
    """A head of all columns in half precision, where that holds it, without the columns of 0, those of closed units."""
    columns = head.weight.any(0)
    bias = None if head.bias is None else _half(head.bias)
    return replace(head, weight=_half(head.weight[:, columns]), bias=bias, columns=columns, others_zero=True)


def _half(values: Tensor) -> Tensor:
    short = values.half()
    return short if bool(short.isfinite().all()) else values


def _own_columns(model: MaskedModel, task: int, gone: Collection[int]) -> Tensor:
    """Columns of a shared head that only this task reads, bool ``(features,)``; tasks that are gone don't count."""
    name = f"{SHARED_HEAD}.weight"
    use = {other: model.graph.parameter_use(mask)[name][0] > 0 for other, mask in model.masks.items()}
    columns = use[task].clone()
    for other, used in use.items():
        if other != task and other not in gone:
            columns &= ~used
    return columns


@torch.no_grad()
def fit_trained_head(strategy: Strategy, task: int, seed: int) -> str | None:
    """Fit the head of a task whose mask has just been kept, in the place of the one that was trained under its gate."""
    model: TaskMaskedModel = strategy.model
    x, labels = training_samples(strategy, MOST_SAMPLES, seed)
    with evaluating(model):
        features = torch.cat([model.features(input_of(model, part), task) for part in x.split(BATCH)])
    try:
        head = fitted_head(model, task, features, labels.to(features.device))
    except FitError as error:
        return f"task {task} keeps the head that it was trained with: {error}"
    if head is not None:
        for tensor, value in head.places(model, task):
            tensor.copy_(value)
    return None


STATISTICS_BATCHES = 16
"""Mini-batches from which running statistics are taken again."""
BATCH, BATCH_OF_LARGE, BATCH_OF_ROWS = 512, 32, 4096
"""Samples at a time: what a large network makes of more than a few images leaves the caches of a CPU."""
LARGE = 1e10
"""Products of a weight and an input in a pass over all samples from which on a network counts as large."""


class CounterfactualFeatures:
    """Features of a task's samples, and running statistics of its norms; nothing that its mask closes is computed."""

    def __init__(self, model: TaskMaskedModel, task: int, x: Any, mb_size: int) -> None:
        self.model, self.task, self.mb_size, self.x = model, task, mb_size, input_of(model, x)
        self._mask = model.binary_mask(task)
        one = isinstance(self.x, Tensor)
        weights = list(model.backbone.parameters())
        # Images that a network without convolutions flattens are rows, as samples of two axes are.
        flat = one and (x.dim() == 2 or (x.dim() == 4 and all(weight.dim() <= 2 for weight in weights)))
        if self.x.device.type != "cpu":
            self._batch = BATCH
        elif flat and x.is_floating_point():
            self._batch = BATCH_OF_ROWS
        else:  # every weight at every place: an upper bound
            large = 2 * sum(weight.numel() for weight in weights) * x.numel() >= LARGE
            self._batch = BATCH_OF_LARGE if large else BATCH

    def __call__(self, part: slice | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Features ``(n, features)`` and statistics by name in the task's own modules; there may be none.

        Of a part of the samples they are those that the task has; else they are taken again.
        """
        parts = deepcopy(self.model.task_parts(self.task))
        norms = running_norms(parts)
        with evaluating(self.model):
            if norms and part is None:
                batches = self.x.split(self.mb_size)[:STATISTICS_BATCHES]
                retake(norms, (some for some in batches if len(some) > 1), lambda x: self._features(x, parts))
            samples = self.x if part is None else self.x[part]
            features = torch.cat([self._features(some, parts) for some in samples.split(self._batch)])
        return features, dict(parts.named_buffers()) if parts is not None and norms else {}

    def _features(self, x: Tensor, parts: torch.nn.Module | None) -> Tensor:
        return self.model.masked_features(x, self._mask, parts)
