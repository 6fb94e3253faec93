"""Compute the features of a task's samples, and fit heads to these features."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avalanche_amnesia.bits import as_integers
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.norm_statistics import retake, running_norms
from avalanche_amnesia.training.task_faults import drawn_positions, input_of, samples_at
from avalanche_amnesia.unit_graph.backbones import evaluating
from avalanche_amnesia.unit_graph.graph import OpenEntries
from avalanche_amnesia.unlearning.compensation import FittedHead
from avalanche_amnesia.unlearning.logistic import FEW, fit_head, largest

MOST_KEPT = 2**28
"""Largest number of bytes for the cached outputs of a layer."""


class _Kept(NamedTuple):
    """Cached outputs of a layer for all samples, computed under two ``states`` of its weights."""

    states: Tensor  # (2, units, inputs + 1)
    columns: Tensor
    is_open: Tensor
    results: Tensor  # (n, columns); the last column is 0, for closed units


class FirstLayers:
    """Cache of linear layers that read samples, for two states of their weights; computes only units in neither state.

    Such a layer is most of a small network. Usually one task wrote into a unit; its weights then have only two states,
    with all tasks or with none. The first two passes, on any samples, store these states.

    Attributes:
        place: the samples, among all, that the next forward reads.
        columns: layer → each unit's column in the cached outputs; cleared when a pass begins.
    """

    def __init__(self, samples: Tensor, entries: Mapping[str, OpenEntries]) -> None:
        self._rows, self._entries = samples.flatten(1), entries
        self.place = slice(None)
        self._first: dict[str, Tensor] = {}
        self._kept: dict[str, _Kept | None] = {}
        self.columns: dict[str, Tensor | None] = {}

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Return the output of the layer ``name`` for the input ``x``, or None if the caller must compute it."""
        rows = self._rows[self.place]
        if (x.data_ptr(), x.shape, x.stride()) != (rows.data_ptr(), rows.shape, rows.stride()):
            return None
        if name not in self.columns:
            units = torch.cat([weight, (weight.new_zeros(len(weight)) if bias is None else bias)[:, None]], 1)
            self.columns[name] = self._columns_of(name, units)
        columns, kept = self.columns[name], self._kept.get(name)
        if columns is None or kept is None:
            return None
        result = kept.results[self.place].index_select(1, columns.clamp_min(0))
        others = (columns < 0).nonzero()[:, 0]
        if len(others):
            result.index_copy_(1, others, F.linear(x, weight[others], None if bias is None else bias[others]))
        return result

    def _columns_of(self, name: str, units: Tensor) -> Tensor | None:
        """Return each unit's column in the cached outputs, -1 if its weights have neither state; None without any."""
        if name not in self._first:
            self._first[name] = units
            return None
        if name not in self._kept:
            self._kept[name] = self._keep(self._first[name], units, self._entries.get(name))
        kept = self._kept[name]
        if kept is None:
            return None
        # In numpy, because torch takes four times as long to compare rows.
        same = as_integers(kept.states).numpy(force=True) == as_integers(units).numpy(force=True)
        as_first, as_second = torch.from_numpy(same.all(2)).to(units.device) | ~kept.is_open
        return torch.where(as_first, kept.columns[0], torch.where(as_second, kept.columns[1], -1))

    def _keep(self, first: Tensor, second: Tensor, entries: OpenEntries | None) -> _Kept | None:
        rows = None if entries is None else entries.rows
        is_open = torch.full_like(first[:, 0], rows is None, dtype=torch.bool)
        if rows is not None:
            is_open[rows] = True
        differ = (first != second).any(1) & is_open
        computed = torch.cat([first[is_open], second[differ], first.new_zeros(1, first.shape[1])])
        if len(computed) * len(self._rows) * first.element_size() > MOST_KEPT:
            return None
        of_first = torch.where(is_open, is_open.cumsum(0) - 1, len(computed) - 1)
        of_second = torch.where(differ, is_open.sum() + differ.cumsum(0) - 1, of_first)
        results = F.linear(self._rows, computed[:, :-1], computed[:, -1])
        return _Kept(torch.stack([first, second]), torch.stack([of_first, of_second]), is_open, results)


MOST_SAMPLES = 20_000


def fitted_head(
    model: TaskMaskedModel,
    task: int,
    features: Tensor,
    labels: Tensor,
) -> FittedHead:
    """Return a head of a task, fitted to features ``(n, features)`` and labels ``(n,)``."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))  # no half can be whitened
    held = dict(model.head(task).named_parameters())
    classes, has_bias = len(held["weight"]), "bias" in held
    weight, bias = fit_head(features, labels, classes, has_bias=has_bias)
    return FittedHead(weight, bias if has_bias else None)


def compacted(head: FittedHead) -> FittedHead:
    """Return a smaller copy of a head: half precision if its values fit, without the zero columns of closed units."""
    columns = head.weight.any(0)
    bias = None if head.bias is None else _half(head.bias)
    return replace(head, weight=_half(head.weight[:, columns]), bias=bias, columns=columns)


def _half(values: Tensor) -> Tensor:
    short = values.half()
    return short if bool(short.isfinite().all()) else values


BATCH, BATCH_OF_LARGE, BATCH_OF_ROWS = 512, 32, 2048
"""Samples per forward; few in a large network, because activations of many images exceed the caches of a CPU."""
SURE = 0.02
"""Error, ``1 - p`` of the true class, up to which a head is sure of a sample.

Heads for features without other tasks are fitted without such samples: on validation images of three streams they are
up to .1 points better by that, or .03 worse. A third of the samples is used in any case, if there are many.
"""
LARGE = 1e10
"""Least number of products of a weight and an input, in a pass over all samples, of a large network."""
ALL = slice(None)


def _reads_rows(model: TaskMaskedModel, x: Any) -> bool:
    """Return True if samples are rows for the network: two axes, or images if it has no convolution."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    return x.dim() == 2 or (x.dim() == 4 and all(weight.dim() <= 2 for weight in model.backbone.parameters()))


@torch.no_grad()
def fit_trained_head(strategy: Strategy, task: int, seed: int) -> Tensor:
    """Replace a task's head, trained under a soft gate, by a head fitted to features under the final mask.

    Returns the positions of the task's samples for fitting heads to features without other tasks.
    """
    model: TaskMaskedModel = strategy.model
    positions = drawn_positions(strategy, MOST_SAMPLES, seed)
    x, labels = samples_at(strategy, positions)
    size = BATCH_OF_ROWS if _reads_rows(model, x) else BATCH
    with evaluating(model):
        features = torch.cat([model.features(input_of(model, part), task) for part in x.split(size)])
    labels = labels.to(features.device)
    head = fitted_head(model, task, features, labels)
    for tensor, value in head.places(model, task):
        tensor.copy_(value)
    logits = model.head(task)(features).float().T.contiguous()  # samples last: a softmax over rows is slow
    errors = 1 - logits.softmax(0).gather(0, labels[None])[0]
    return positions[largest(errors, SURE, max(FEW, len(errors) // 3)).to(positions.device)]


class CounterfactualFeatures:
    """Computes features of a task's samples ``x`` with a model in evaluation mode, without units that its mask closes.

    Running statistics of its norms are computed from ``seen``, mini-batches of more than one sample.
    """

    features: Tensor  # of all samples, (n, features), each from the last pass over its sample

    def __init__(self, model: TaskMaskedModel, task: int, x: Any, seen: Sequence[Any]) -> None:
        self.model, self.task, self.x = model, task, input_of(model, x)
        self._seen = [input_of(model, some) for some in seen]
        self._mask: Any = model.binary_mask(task)
        self._parts = deepcopy(model.task_parts(task))
        self._first_layers: FirstLayers | None = None
        rows = _reads_rows(model, self.x)
        # Every weight at every place: an upper bound.
        large = 2 * sum(weight.numel() for weight in model.backbone.parameters()) * x.numel() >= LARGE
        for_cpu = BATCH_OF_ROWS if rows else BATCH_OF_LARGE if large else BATCH
        self._batch = for_cpu if self.x.device.type == "cpu" else BATCH
        if rows and isinstance(model, MaskedModel):
            self._mask = masks = model.read_mask(self._mask)
            masks.first_layers = self._first_layers = FirstLayers(self.x, masks.entries)

    def __call__(self, part: slice = ALL) -> dict[str, Tensor]:
        """Compute features of the samples ``part``; return buffers of the task's norms by name (empty without norms).

        Running statistics are computed again only in a pass over all samples.
        """
        parts = deepcopy(self._parts) if running_norms(self._parts) else self._parts
        norms = running_norms(parts)
        places = range(len(self.x))[part]
        if self._first_layers is not None:
            self._first_layers.columns.clear()
        if norms and part == ALL:
            retake(norms, self._seen, lambda some: self.model.masked_features(some, self._mask, parts))
        for start in range(0, len(places), self._batch):
            some = places[start : start + self._batch]
            batch = slice(some.start, some.stop, some.step)
            if self._first_layers is not None:
                self._first_layers.place = batch
            features = self.model.masked_features(self.x[batch], self._mask, parts)
            if not hasattr(self, "features"):
                self.features = features.new_empty(len(self.x), features.shape[1])
            self.features[batch] = features
        return dict(parts.named_buffers()) if parts is not None and norms else {}
