"""Operations that move entries about: the same operation moves their sets."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from avalanche_amnesia.models.findings import Refused
from avalanche_amnesia.models.registry import MAY_RETURN_ITSELF, Fallback, rule
from avalanche_amnesia.models.rules.arithmetic import adopt
from avalanche_amnesia.models.trees import leaves, map_leaves
from avalanche_amnesia.models.units import NOTHING, compact
from avalanche_amnesia.models.values import ParameterValue, Value
from avalanche_amnesia.models.walk import Walk

_MOVES = (
    *(torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.swapaxes, torch.swapdims, torch.movedim),
    *(torch.moveaxis, torch.squeeze, torch.unsqueeze, torch.unbind, torch.chunk, torch.split, torch.tensor_split),
    *(torch.narrow, torch.select, torch.roll, torch.flip, torch.tile, torch.t, torch.unflatten, torch.select_copy),
    *(torch.broadcast_to, torch.index_select, torch.rot90, torch.atleast_2d, torch.atleast_3d, torch.expand_copy),
    *(F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle, torch.channel_shuffle, torch.repeat_interleave),
    *("flatten", "view", "reshape", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze"),
    *("unsqueeze", "unbind", "chunk", "split", "tensor_split", "narrow", "select", "roll", "flip", "t", "unflatten"),
    *("expand", "expand_as", "repeat", "tile", "view_as", "reshape_as", "broadcast_to", "index_select", "unfold"),
    "repeat_interleave",
)
_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack)


_VIEWS = (nn.Flatten, nn.Unflatten, operator.getitem, getattr)
MAY_RETURN_ITSELF |= {*_MOVES, *_VIEWS}


@rule(*_MOVES)
def moved(walk: Walk, node: fx.Node, *args: Any, **options: Any) -> Any:
    """The same operation on the sets."""
    operands = [leaf for leaf in leaves((args, options)) if isinstance(leaf, (Value, ParameterValue))]
    first = operands[0]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if len(operands) > 1 and not name.endswith("_as"):
        return walk.anything(node)  # which entries are moved depends on another value
    args, options = map_leaves((args, options), _places)
    target = {"view": "reshape", "view_as": "reshape_as"}.get(str(node.target), node.target)
    result = getattr(args[0], target)(*args[1:], **options) if isinstance(target, str) else target(*args, **options)
    return map_leaves(result, lambda place: _again(first, place))


@rule(nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
def moved_by_module(walk: Walk, node: fx.Node, x: Value) -> Value:
    """A module that moves entries."""
    return x.like(walk.module(node)(x.ids.contiguous()))


@rule(*_JOINS)
def joined(walk: Walk, node: fx.Node, tensors: Sequence[Any], dim: int = 0, **options: Any) -> Value:
    """Values side by side: so are their sets. A parameter takes on the units of the values beside it."""
    dim = options.get("dim", options.get("axis", dim))
    values = [part for part in tensors if isinstance(part, Value)]
    if not values:
        raise Refused("parameters are joined before they are used", "use them one by one, or declare them frozen=[…]")
    stacked = node.target is torch.stack
    parts: list[Tensor] = []
    masked = max(value.masked for value in values)
    for part in tensors:
        if isinstance(part, Value):
            parts.append(part.ids)
            continue
        if isinstance(part, Tensor):  # a constant: in use whatever the masks say
            parts.append(torch.zeros(part.shape, dtype=torch.long))
            continue
        beside = compact(values[0].ids)
        if stacked or node.target in (torch.hstack, torch.vstack) or beside.shape[dim] != 1:
            raise Refused(
                f"parameter {part.name} is put beside values along an axis on which their units differ",
                "put it beside them along another axis (tokens), or declare it frozen=[…]",
            )
        ids = beside.expand(part.index.shape)
        masked = max(masked, adopt(walk, part, ids))
        parts.append(ids)
    join: Any = torch.cat if node.target in (torch.concat, torch.concatenate) else node.target
    result = join(parts) if node.target in (torch.hstack, torch.vstack) else join(parts, dim)
    return values[0].like(result, masked)


@rule(F.pad, zeros=True)
def padded(
    walk: Walk, node: fx.Node, x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Value:
    """Zeros around a value, which are in use under no mask."""
    if not isinstance(x, Value):
        raise Refused("a parameter is padded before it is used", "use it as it is")
    if mode != "constant" or value:
        return walk.anything(node)
    return x.like(F.pad(x.ids, list(pad), value=NOTHING))


@rule(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, zeros=True)
def padded_by_module(walk: Walk, node: fx.Node, x: Value) -> Value:
    """A module that pads with zeros."""
    return x.like(F.pad(x.ids, list(walk.module(node).padding), value=NOTHING))  # type: ignore[arg-type]


@rule(operator.getitem)
def item(walk: Walk, node: fx.Node, x: Any, index: Any) -> Any:
    """A part of a tensor, or an entry of a tuple."""
    if not isinstance(x, (Value, ParameterValue)):
        return x[index] if not any(isinstance(leaf, Value) for leaf in leaves(index)) else walk.anything(node)
    if any(isinstance(leaf, (Value, ParameterValue)) for leaf in leaves(index)):
        return walk.anything(node)
    return _again(x, _places(x)[index])


_SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout", "training"}


@rule(getattr, builtins.getattr)
def attribute(walk: Walk, node: fx.Node, x: Any, name: str, *default: Any) -> Any:
    """Shape, type and the like; transposed views."""
    if not isinstance(x, (Value, ParameterValue)):
        return getattr(x, name, *default)
    if name in ("T", "mT", "H", "mH"):
        return _again(x, getattr(_places(x), name))
    if name == "device":
        return next(iter(walk.parameters.values())).device
    if name not in _SHAPE_ATTRIBUTES:
        raise Refused(f"attribute {name!r} of a value has no masking rule", "use torch's functions")
    return getattr(x.meta(), name)


@rule("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "get_device", "is_floating_point")
@rule(torch.numel, torch.is_tensor, torch.is_floating_point, len)
def size(walk: Walk, node: fx.Node, x: Any, *args: Any) -> Any:
    """Numbers, not tensors."""
    if node.target is len:
        return len(x.meta()) if isinstance(x, (Value, ParameterValue)) else len(x)
    target = node.target if isinstance(node.target, str) else node.target.__name__
    return getattr(x.meta(), target)(*args)


_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "poisson", "empty", "new_empty", "dropout", "exponential")


@rule(Fallback.CONSTANT)
def constant(walk: Walk, node: fx.Node, *args: Any, **options: Any) -> Any:
    """Nothing of the network's values is in it: computed as it stands."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.startswith(_RANDOM):  # other values at every call: nothing may be read off this one
        return walk.anything(node)
    try:
        if isinstance(target, str):
            return getattr(args[0], target)(*args[1:], **options)
        assert callable(target)
        return target(*args, **options)
    except Exception as error:  # whatever the operation raises
        raise Refused(f"it can't be worked out in advance ({error})", "compute it outside of forward") from error


def _places(leaf: Any) -> Any:
    if isinstance(leaf, Value):
        return leaf.ids
    return leaf.index if isinstance(leaf, ParameterValue) else leaf


def _again(operand: Value | ParameterValue, places: Any) -> Any:
    if not isinstance(places, Tensor):
        return places
    if isinstance(operand, Value):
        return operand.like(places)
    return operand.part(places)
