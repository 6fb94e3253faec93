"""Rules for operations on parameters only, which compute weights (``W + BA``, weight norm, standardisation)."""

from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.rules import elementwise
from avalanche_amnesia.unit_graph.values import ParameterValue, combine, leaves
from avalanche_amnesia.unit_graph.walk import Walk, all_of_all, derives

A: Any = torch.ops.aten


@derives(*elementwise.SAME_VALUES, *elementwise.KEEP_ZERO, *elementwise.LIFT, *elementwise.POLES, A.prelu)
@derives(A.add, A.sub, A.rsub, A.mul, A.div, A.pow, A.addcmul, A.maximum, A.minimum, A.where, A.lerp)
def entry_by_entry(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> ParameterValue:
    """Trace an elementwise operation on parameters: an entry depends on the operands' entries at the same position."""
    operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, ParameterValue)]
    return combine(walk.result(node).shape, operands)


@derives(A.matmul, A.mm, A.bmm)
def product_of_parameters(walk: Walk, node: fx.Node, a: Any, b: Any) -> Any:
    """Return which parameter entries each entry of the product ``AB`` depends on: a row of ``A``, a column of ``B``."""
    operands = [(a, -1), (b, -2)]
    if any(isinstance(x, (ParameterValue, Tensor)) and len(x.shape) < 2 for x, _ in operands):
        return all_of_all(walk, node, a, b)
    parts = [reduce_over(x, [dim], keepdim=True) for x, dim in operands if isinstance(x, ParameterValue)]
    return combine(walk.result(node).shape, parts)


def reduce_over(x: ParameterValue, dims: list[int], keepdim: bool) -> ParameterValue:
    """Return the traced reduction of a parameter over ``dims``: an entry depends on all entries reduced into it."""
    dims = [dim % len(x.shape) for dim in dims]
    kept = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    numbers = torch.arange(torch.Size(kept).numel()).reshape(kept)
    shape = kept if keepdim else [size for dim, size in enumerate(x.shape) if dim not in dims]
    return x.combine_entries(numbers, tuple(shape))


@derives(A.mean, A.sum, A.amax, A.amin, A.var, A.std, A.norm, A.linalg_vector_norm)
def reduce_parameter(walk: Walk, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    """Trace a mean, norm or similar reduction of a parameter: an entry depends on all entries that it reduces."""
    dims = reduced_dims(node, len(x.shape)) if isinstance(x, ParameterValue) else None
    result = walk.result(node)
    if dims is None or not isinstance(result, Tensor):
        return all_of_all(walk, node, x, *args, **options)
    return reduce_over(x, dims, keepdim=len(result.shape) == len(x.shape))


def reduced_dims(node: fx.Node, count: int) -> list[int] | None:
    """Return the dimensions over which a node reduces, from its schema and arguments; None for all dimensions."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    dim: Any = given.get("dim")
    if dim is None or dim == []:
        return None
    return sorted({d % count for d in ([dim] if isinstance(dim, int) else dim)})


@derives(A.batch_norm)
def standardised_weight(walk: Walk, node: fx.Node, x: Any, *rest: Any, **options: Any) -> Any:
    """Trace weight standardisation by ``F.batch_norm(weight)``: an entry depends on all weights of its channel."""
    if not isinstance(x, ParameterValue):
        return all_of_all(walk, node, x, *rest, **options)
    by_channel = reduce_over(x, [dim for dim in range(len(x.shape)) if dim != 1], keepdim=True)
    shape = (1, -1, *(1,) * (len(x.shape) - 2))
    affine = [p.move_entries(lambda place: place.reshape(shape)) for p in rest[:2] if isinstance(p, ParameterValue)]
    return combine(walk.result(node).shape, [by_channel, *affine])


@derives(A._weight_norm)
def weight_norm(walk: Walk, node: fx.Node, v: Any, g: Any, dim: int = 0) -> Any:
    """Trace the weight ``g · v / ‖v‖``: an entry depends on all entries of ``v`` with the same index along ``dim``."""
    if not isinstance(v, ParameterValue):
        return all_of_all(walk, node, v, g, dim)
    norms = reduce_over(v, [d for d in range(len(v.shape)) if d != dim % len(v.shape)], keepdim=True)
    return combine(walk.result(node).shape, [x for x in (v, norms, g) if isinstance(x, ParameterValue)])


@derives(A.softmax, A.log_softmax)
def softmax_of_parameter(walk: Walk, node: fx.Node, x: Any, dim: int, *rest: Any) -> Any:
    """Trace the softmax of a parameter: an entry depends on all entries along ``dim``."""
    return combine(x.shape, [reduce_over(x, [dim], keepdim=True)])
