"""Compute the features of a task's samples, and fit heads to these features by logistic regression."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.norm_statistics import recompute, running_norms
from avalanche_amnesia.training.task_faults import drawn_positions, input_of, samples_at
from avalanche_amnesia.unit_graph.backbones import evaluation_mode, first_float
from avalanche_amnesia.unlearning.compensation import FittedHead
from avalanche_amnesia.unlearning.logistic import FEW, fit_head, largest_errors

MOST_SAMPLES = 20_000


def fitted_head(model: TaskMaskedModel, task: int, features: Tensor, labels: Tensor) -> FittedHead:
    """Return a new head for ``task``, fitted to features ``(n, features)`` and labels ``(n,)``."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))  # no half can be whitened
    held = dict(model.head(task).named_parameters())
    classes, has_bias = len(held["weight"]), "bias" in held
    weight, bias = fit_head(features, labels, classes, has_bias=has_bias)
    return FittedHead(weight, bias if has_bias else None)


def compact_head(head: FittedHead) -> FittedHead:
    """Return a smaller copy of a head: half precision if the values fit, without zero columns (of unused units)."""
    columns = head.weight.any(0)
    bias = None if head.bias is None else _to_half(head.bias)
    return replace(head, weight=_to_half(head.weight[:, columns]), bias=bias, columns=columns)


def _to_half(values: Tensor) -> Tensor:
    short = values.half()
    return short if bool(short.isfinite().all()) else values


BATCH, BATCH_ON_CPU, BATCH_OF_ROWS = 512, 32, 2048
"""Samples per forward; few images on a CPU, because activations of many take memory and exceed its caches."""
SURE = 0.02
"""Error, ``1 - p`` of the true class, up to which a head is sure of a sample.

Heads for features without other tasks are fitted without such samples: on validation images of three streams they are
up to .1 points better by that, or .03 worse. A third of the samples is used in any case, if there are many.
"""
ALL = slice(None)


def _batch_for(model: TaskMaskedModel, x: Any) -> int:
    """Return the number of samples ``x`` per forward; more if the model treats them as vectors."""
    if first_float(model).device.type != "cpu":
        return BATCH
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return BATCH_ON_CPU
    rows = x.dim() == 2 or (x.dim() == 4 and all(weight.dim() <= 2 for weight in model.backbone.parameters()))
    return BATCH_OF_ROWS if rows else BATCH_ON_CPU


@torch.no_grad()
def fit_trained_head(strategy: Strategy, task: int, seed: int) -> Tensor:
    """Replace a task's trained head by one fitted to the features under the task's final, binary mask.

    Returns the positions of the task's samples for fitting heads to features without other tasks.
    """
    model: TaskMaskedModel = strategy.model
    positions = drawn_positions(strategy, MOST_SAMPLES, seed)
    x, labels = samples_at(strategy, positions)
    with evaluation_mode(model):
        features = torch.cat([model.features(input_of(model, p), task) for p in x.split(_batch_for(model, x))])
    labels = labels.to(features.device)
    head = fitted_head(model, task, features, labels)
    for tensor, value in head.replacements(model, task):
        tensor.copy_(value)
    logits = model.head(task)(features).float().T.contiguous()  # samples last: a softmax over rows is slow
    errors = 1 - logits.softmax(0).gather(0, labels[None])[0]
    return positions[largest_errors(errors, SURE, max(FEW, len(errors) // 3)).to(positions.device)]


class CounterfactualFeatures:
    """Features of a task's samples ``x`` under its mask; each call computes them again, with the weights at that time.

    Running statistics of its normalisation layers are computed from ``seen``, mini-batches of more than one sample.
    """

    features: Tensor  # of all samples, (n, features), each from the last pass over its sample

    def __init__(self, model: TaskMaskedModel, task: int, x: Any, seen: Sequence[Any]) -> None:
        self.model, self.task, self.x = model, task, input_of(model, x)
        self._seen = [input_of(model, some) for some in seen]
        self._mask: Any = model.binary_mask(task)
        self._parts = deepcopy(model.task_parts(task))
        self._batch = _batch_for(model, self.x)

    def __call__(self, part: slice = ALL) -> dict[str, Tensor]:
        """Store the features of the samples ``part`` in :attr:`features`; return the buffers of the task's norm layers.

        Running statistics are computed again only in a pass over all samples. The result is empty without such layers.
        """
        parts = deepcopy(self._parts) if running_norms(self._parts) else self._parts
        norms = running_norms(parts)
        places = range(len(self.x))[part]
        if norms and part == ALL:
            recompute(norms, self._seen, lambda some: self.model.masked_features(some, self._mask, parts))
        for start in range(0, len(places), self._batch):
            some = places[start : start + self._batch]
            batch = slice(some.start, some.stop, some.step)
            features = self.model.masked_features(self.x[batch], self._mask, parts)
            if not hasattr(self, "features"):
                self.features = features.new_empty(len(self.x), features.shape[1])
            self.features[batch] = features
        return dict(parts.named_buffers()) if parts is not None and norms else {}
