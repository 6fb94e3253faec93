"""Windows over positions: a channel sees itself alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from avalanche_amnesia.models.registry import Rule, rule
from avalanche_amnesia.models.values import Value
from avalanche_amnesia.models.walk import Walk

_BY_AXES = {
    1: (
        *(nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d, nn.LPPool1d),
        *(F.max_pool1d, F.avg_pool1d, F.adaptive_max_pool1d, F.adaptive_avg_pool1d, F.lp_pool1d),
        *(torch.max_pool1d, torch.avg_pool1d, torch.adaptive_avg_pool1d),
    ),
    2: (
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d, nn.LPPool2d, nn.FractionalMaxPool2d),
        *(F.max_pool2d, F.avg_pool2d, F.adaptive_max_pool2d, F.adaptive_avg_pool2d, F.lp_pool2d, torch.max_pool2d),
    ),
    3: (
        *(nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool3d),
        *(F.max_pool3d, F.avg_pool3d, F.adaptive_max_pool3d, F.adaptive_avg_pool3d, torch.max_pool3d),
    ),
}
_RESIZES = (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate, F.upsample)


OVER_POSITIONS: set[Rule] = set()
"""The rules of this file."""


def _pooled(walk: Walk, node: fx.Node, x: Value, axes: int) -> Any:
    result = walk.run_on_meta(node)
    if not isinstance(result, torch.Tensor):
        return walk.anything(node)  # with the places of the maxima
    of_channels = walk.book.sets.over(x.ids, range(-axes, 0), keepdim=True)
    return x.like(of_channels.expand(result.shape))


for _axes, _targets in _BY_AXES.items():

    def _rule(walk: Walk, node: fx.Node, x: Any, *args: Any, _axes: int = _axes, **options: Any) -> Any:
        return _pooled(walk, node, x, _axes)

    OVER_POSITIONS.add(rule(*_targets)(_rule))


@rule(*_RESIZES)
def resized(walk: Walk, node: fx.Node, x: Value, *args: Any, **options: Any) -> Any:
    """Interpolation between positions of a channel."""
    return _pooled(walk, node, x, x.ids.dim() - 2)


OVER_POSITIONS.add(resized)
