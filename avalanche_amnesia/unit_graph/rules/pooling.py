"""Windows over positions, each channel by itself."""

from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.registry import rule
from avalanche_amnesia.unit_graph.values import Masked, Value
from avalanche_amnesia.unit_graph.walk import Walk

A: Any = torch.ops.aten

POOLS = (
    *(A.max_pool1d, A.max_pool2d, A.max_pool3d, A.avg_pool1d, A.avg_pool2d, A.avg_pool3d),
    *(A.adaptive_avg_pool1d, A.adaptive_avg_pool2d, A.adaptive_avg_pool3d, A._adaptive_avg_pool2d),
    *(A.max_pool2d_with_indices, A.max_pool3d_with_indices, A.adaptive_max_pool1d, A.adaptive_max_pool2d),
    *(A.adaptive_max_pool3d, A.fractional_max_pool2d, A.max_pool1d_with_indices),
    *(A.upsample_nearest1d, A.upsample_nearest2d, A.upsample_nearest3d, A._upsample_nearest_exact2d),
    *(A.upsample_linear1d, A.upsample_bilinear2d, A.upsample_trilinear3d, A.upsample_bicubic2d),
    *(A._upsample_bilinear2d_aa, A._upsample_bicubic2d_aa, A._upsample_nearest_exact1d),
)


@rule(*POOLS)
def pooled(walk: Walk, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    """Pooling and interpolation between positions: zero where the whole channel is."""
    if not isinstance(x, Value):
        return walk.conservative(node)
    axes = range(2 if "2d" in str(node.target) else 3 if "3d" in str(node.target) else 1)
    of_channels = walk.draft.sets.over(x.ids, [-1 - axis for axis in axes], keepdim=True)
    result = walk.result(node)
    if isinstance(result, Tensor):
        return x.like(of_channels.expand(result.shape))
    values, places = result  # where the largest entries lie: always the same place in a channel that is constant
    ids = of_channels.expand(values.shape)
    return x.like(ids), Value(ids, places.dtype, max(x.masked, Masked.CONSTANT))
