"""Rules for operations on parameters only: computed weights (``W + BA``, standardised, normed)."""

from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.rules import elementwise
from avalanche_amnesia.unit_graph.values import Constant, ParameterValue, leaves, together
from avalanche_amnesia.unit_graph.walk import Walk, all_of_all, derives

A: Any = torch.ops.aten


@derives(*elementwise.SAME_VALUES, *elementwise.KEEP_ZERO, *elementwise.LIFT, *elementwise.POLES, A.prelu)
@derives(A.add, A.sub, A.rsub, A.mul, A.div, A.pow, A.addcmul, A.maximum, A.minimum, A.where, A.lerp)
def entry_by_entry(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> ParameterValue:
    """Let every entry depend on the operands' entries at the same position."""
    operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, ParameterValue)]
    result = walk.result(node)
    return together(result.shape, result.dtype, operands)


@derives(A.matmul, A.mm, A.bmm)
def product(walk: Walk, node: fx.Node, a: Any, b: Any) -> Any:
    """Treat ``AB``: an entry depends on a row of ``A`` and a column of ``B``."""
    operands = [(a, -1), (b, -2)]
    if any(isinstance(x, (ParameterValue, Constant)) and len(x.shape) < 2 for x, _ in operands):
        return all_of_all(walk, node, a, b)
    result = walk.result(node)
    parts = [over(x, [dim], keepdim=True) for x, dim in operands if isinstance(x, ParameterValue)]
    return together(result.shape, result.dtype, parts)


def over(x: ParameterValue, dims: list[int], keepdim: bool) -> ParameterValue:
    """Let every entry of the result depend on all entries along some dimensions."""
    dims = [dim % len(x.shape) for dim in dims]
    kept = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    numbers = torch.arange(torch.Size(kept).numel()).reshape(kept)
    shape = kept if keepdim else [size for dim, size in enumerate(x.shape) if dim not in dims]
    return x.mixed(numbers, tuple(shape), x.dtype)


@derives(A.mean, A.sum, A.amax, A.amin, A.var, A.std, A.norm, A.linalg_vector_norm)
def reduced(walk: Walk, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    """Treat a mean, a norm or a similar reduction over some dimensions."""
    dims = walk_dims(node, len(x.shape)) if isinstance(x, ParameterValue) else None
    result = walk.result(node)
    if dims is None or not isinstance(result, Tensor):
        return all_of_all(walk, node, x, *args, **options)
    return over(x, dims, keepdim=len(result.shape) == len(x.shape))


def walk_dims(node: fx.Node, count: int) -> list[int] | None:
    """Return the dimensions of a reduction, from its schema; None if it covers all of them."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    dim: Any = given.get("dim")
    if dim is None or dim == []:
        return None
    return sorted({d % count for d in ([dim] if isinstance(dim, int) else dim)})


@derives(A.batch_norm)
def standardised(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Any:
    """Treat a weight that is standardised by channel, as if it were a batch."""
    if not isinstance(x, ParameterValue):
        return all_of_all(walk, node, x, *rest, **options)
    by_channel = over(x, [dim for dim in range(len(x.shape)) if dim != 1], keepdim=True)
    result = walk.result(node)
    shape = (1, -1, *(1,) * (len(x.shape) - 2))
    affine = [p.moved(lambda place: place.reshape(shape)) for p in rest[:2] if isinstance(p, ParameterValue)]
    return together(result.shape, result.dtype, [by_channel, *affine])


@derives(A._weight_norm)
def weight_norm(walk: Walk, node: fx.Node, v: Any, g: Any, dim: int = 0) -> Any:
    """Treat ``g · v / ‖v‖``, with the norm over all dimensions but one."""
    if not isinstance(v, ParameterValue):
        return all_of_all(walk, node, v, g, dim)
    result = walk.result(node)
    norms = over(v, [d for d in range(len(v.shape)) if d != dim % len(v.shape)], keepdim=True)
    return together(result.shape, result.dtype, [x for x in (v, norms, g) if isinstance(x, ParameterValue)])


@derives(A.softmax, A.log_softmax)
def normalised(walk: Walk, node: fx.Node, x: Any, dim: int, *rest: Any) -> Any:
    """Treat numbers that are normalised to sum 1 along a dimension."""
    return together(x.shape, walk.result(node).dtype, [over(x, [dim], keepdim=True)])
