"""Features of a task's samples, under one set of removed tasks after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from avalanche_amnesia.contrib.export.subnet_features import FeatureSubnet, feature_subnet
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.training.norm_statistics import retake, running_norms

STATISTICS_BATCHES = 16
"""Mini-batches from which running statistics are taken again."""

WORTH_CUTTING = 1e10
"""FLOPs of a masked pass from which on it takes longer than cutting the network to the task's open units first."""


BATCH, BATCH_OF_LARGE = 512, 32
"""Samples at a time: what a large network makes of more than a few images leaves the caches of a CPU."""


class CounterfactualFeatures:
    """Features of a task's samples, and running statistics of its norms, by the backbone as it is when called.

    Where a pass over all samples is long enough, it goes through the task's open units alone.
    """

    def __init__(self, model: TaskMaskedModel, task: int, x: Tensor, mb_size: int) -> None:
        like = next(p for p in model.parameters() if p.is_floating_point())
        self.model, self.task, self.mb_size, self.device = model, task, mb_size, like.device
        self.x = x.to(like.dtype) if x.is_floating_point() else x
        self._mask = model.binary_mask(task)
        self._to_cut = model if isinstance(model, MaskedModel) and self._takes_long() else None

    def __call__(self) -> tuple[Tensor, dict[str, Tensor]]:
        """``(n, features)``, and statistics by name in the task's own modules; empty without running statistics."""
        subnet = None if self._to_cut is None else self._subnet(self._to_cut)
        with evaluating(self.model):
            features, statistics = self._masked() if subnet is None else self._cut(subnet)
        return features.to(torch.promote_types(features.dtype, torch.float32)), statistics  # no half can be whitened

    def _subnet(self, model: MaskedModel) -> FeatureSubnet | None:
        subnet = None
        try:
            subnet = feature_subnet(model, self.task)
        except Exception as error:  # whatever a module raises: a task that was trained must not be lost to a shortcut
            warnings.warn(
                f"task {self.task} can't be cut to its open units ({error}); its heads are fitted by way of all units",
                stacklevel=2,
            )
        if subnet is None:  # nor can it be without other tasks
            self._to_cut = None
        return subnet

    def _masked(self) -> tuple[Tensor, dict[str, Tensor]]:
        parts = deepcopy(self.model.task_parts(self.task))
        norms = running_norms(parts)
        features = self._run(lambda x: self.model.masked_features(x, self._mask, parts), norms, BATCH)
        return features, dict(parts.named_buffers()) if parts is not None and norms else {}

    def _cut(self, subnet: FeatureSubnet) -> tuple[Tensor, dict[str, Tensor]]:
        norms = [norm for norm, _ in subnet.norms.values()]
        kept = self._run(subnet.network, norms, BATCH_OF_LARGE if self.device.type == "cpu" else BATCH)
        features = kept.new_zeros(len(kept), self.model.n_features)
        return features.index_copy_(1, subnet.units.to(kept.device), kept), subnet.statistics()

    def _run(self, network: Callable[[Tensor], Tensor], norms: list[Any], batch: int) -> Tensor:
        if norms:
            batches = (part.to(self.device) for part in self.x.split(self.mb_size)[:STATISTICS_BATCHES])
            retake(norms, (part for part in batches if len(part) > 1), network)
        return torch.cat([network(part.to(self.device)) for part in self.x.split(batch)])

    def _takes_long(self) -> bool:
        """Tell whether a masked pass over all samples does; a module that runs under no counter counts as short."""
        # Counting takes as long as a small network's head: not where every weight at every place is too little.
        places = 1 if self.x.is_floating_point() and self.x.dim() == 2 else self.x[:1].numel()
        weights = sum(parameter.numel() for parameter in self.model.backbone.parameters())
        if 2 * weights * places * len(self.x) < WORTH_CUTTING:
            return False
        some = self.x[:2].to(self.device)
        try:
            with evaluating(self.model), FlopCounterMode(display=False) as counter:
                self.model.masked_features(some, self._mask, self.model.task_parts(self.task))
        except Exception:  # the pass itself, without the counter, follows and says what is wrong with it
            return False
        return counter.get_total_flops() / len(some) * len(self.x) >= WORTH_CUTTING
