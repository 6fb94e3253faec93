"""Rules for operations that mix entries: reductions, pooling, matrix products of values, attention."""

from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.findings import Unsupported
from avalanche_amnesia.unit_graph.rules.derived import reduced_dims
from avalanche_amnesia.unit_graph.rules.elementwise import assign_units
from avalanche_amnesia.unit_graph.rules.weighted import connect
from avalanche_amnesia.unit_graph.values import ALWAYS, Masked, ParameterValue, Value
from avalanche_amnesia.unit_graph.walk import Walk, rule

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


@rule(A.mean, A.sum, A.amax, A.amin, A.std, A.var, A.norm, A.linalg_vector_norm)
def reduction(walk: Walk, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    """Trace units through a reduction (sum, mean …): an entry depends on the units of all entries that it reduces."""
    result = walk.result(node)
    dims = reduced_dims(node, len(x.shape))
    if not isinstance(x, Value) or not isinstance(result, Tensor) or dims is None:
        return walk.conservative(node)
    if 0 in dims and len(x.shape) == 2:
        raise Unsupported("it mixes the samples of a batch", "leave the first dimension alone")
    return x.like(walk.draft.sets.union_along(x.ids, dims, keepdim=len(result.shape) == len(x.shape)))


@rule(A.cumsum)
def cumulative_sum(walk: Walk, node: fx.Node, x: Any, dim: int, **options: Any) -> Any:
    """Trace units through a cumulative sum: to be safe, an entry depends on the units of all entries along ``dim``."""
    if not isinstance(x, Value):
        return walk.conservative(node)
    return x.like(walk.draft.sets.union_along(x.ids, [dim], keepdim=True).expand(x.shape))


@rule(*POOLS)
def pooling(walk: Walk, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    """Trace units through pooling or interpolation: an entry depends on the units of its whole channel."""
    if not isinstance(x, Value):
        return walk.conservative(node)
    axes = range(2 if "2d" in str(node.target) else 3 if "3d" in str(node.target) else 1)
    of_channels = walk.draft.sets.union_along(x.ids, [-1 - axis for axis in axes], keepdim=True)
    result = walk.result(node)
    if isinstance(result, Tensor):
        return x.like(of_channels.expand(result.shape))
    ids = of_channels.expand(result[0].shape)
    # Positions of the largest entries are constant in a constant channel.
    return x.like(ids), Value(ids, max(x.masked, Masked.CONSTANT))


@rule(A.matmul, A.bmm, A.mm)
def matrix_product(walk: Walk, node: fx.Node, a: Any, b: Any) -> Any:
    """Return the units that ``a @ b`` depends on; if ``b`` is a trained weight, they are new units, one per column."""
    if isinstance(a, Value) and isinstance(b, ParameterValue) and len(b.shape) == 2 and not b.fixed:
        walk.zero_inputs(node)
        return connect(walk, node, a, b, None, unit_axis=1)
    if not (isinstance(a, Value) and isinstance(b, Value)) or a.ids.dim() < 2 or b.ids.dim() < 2:
        return walk.conservative(node)
    result, sets = walk.result(node), walk.draft.sets
    options = [
        ids.expand(result.shape)
        for value, ids in (
            (b, sets.union_along(b.ids, [-2], keepdim=True)),
            (a, sets.union_along(a.ids, [-1], keepdim=True)),
        )
        if value.masked is Masked.ZERO
    ]
    if not options:
        return walk.conservative(node)
    return Value(min(options, key=lambda ids: float((ids == ALWAYS).float().mean())))


@rule(A.scaled_dot_product_attention)
def attention(
    walk: Walk, node: fx.Node, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any
) -> Any:
    """Trace units through attention: an entry depends on the units of ``value`` at all positions."""
    for learned in (query, key, attn_mask):
        if isinstance(learned, ParameterValue):  # shared attention weights read it, so only the first task trains it
            assign_units(walk, learned, torch.full((1,) * len(learned.shape), ALWAYS).expand(learned.shape))
    if not isinstance(value, Value) or value.masked is not Masked.ZERO:
        return walk.conservative(node)
    # Masked queries and keys may hold constants, but no numbers that other tasks change.
    walk.zero_inputs(node, dirty_only=True)
    ids = walk.draft.sets.union_along(value.ids, [-2], keepdim=True)
    result = walk.result(node)
    heads = (*result.shape[:-2], 1, ids.shape[-1])
    if ids.dim() == 4 and ids.shape[1] != result.shape[1]:  # several query heads share one key and value head
        ids = ids.repeat_interleave(result.shape[1] // ids.shape[1], 1)
    return Value(ids.expand(heads).expand(result.shape))
