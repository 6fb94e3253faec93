"""A network for one task's features without its closed units, whose norms can take their statistics again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.contrib.export.shrinking import Shrinking
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.unit_graph.masking import call_owned
from avalanche_amnesia.unit_graph.task_owned import TaskBatchNorm


@dataclass(frozen=True)
class FeatureSubnet:
    """A task's features without the units that its mask closes."""

    network: fx.GraphModule
    units: Tensor
    norms: Mapping[str, tuple[nn.Module, Tensor]]
    parts: nn.Module

    def statistics(self) -> dict[str, Tensor]:
        """The norms' running statistics, by name in ``parts``; channels that are left out hold those of ``parts``."""
        whole = dict(self.parts.named_buffers())
        found = {}
        for name, (norm, channels) in self.norms.items():
            for kind in ("running_mean", "running_var"):
                value = whole[f"{name}.{kind}"]
                cut = norm.get_buffer(kind)[: len(channels)].to(value)  # of a closed layer it has a channel more
                found[f"{name}.{kind}"] = value.index_copy(0, channels.to(value.device), cut)
        return found


def feature_subnet(model: MaskedModel, task: int) -> FeatureSubnet | None:
    """A task's features by a smaller network, as :func:`extract` makes it, with batch norms of its own."""
    parts = model.parts_of(task)
    keeping = {name.replace("/", "."): part for name, part in parts.named_modules() if _keeps_statistics(part)}
    calls = [node.args[1] for node in model.backbone.program().graph.nodes if node.target is call_owned]
    if any(calls.count(name) != 1 or not isinstance(norm, TaskBatchNorm) for name, norm in keeping.items()):
        return None
    walk = Shrinking(model, task, fold=False)
    with torch.no_grad():
        features = walk.run()
        features = features if features.along(-1) else walk.whole(features)
        network = walk.finished(features.node).to(next(model.parameters()).device)
    names = {name.replace("/", "."): name for name, _ in parts.named_modules()}
    norms = {names[name]: made for name, made in walk.norms.items() if name in keeping}
    return FeatureSubnet(network, features.kept(-1), norms, parts)


def _keeps_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None
