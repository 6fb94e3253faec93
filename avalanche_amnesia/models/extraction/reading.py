"""Looking ahead: what the nodes behind one read of its result."""

from __future__ import annotations

import builtins
import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from avalanche_amnesia.models.task_owned import TaskBatchNorm

if TYPE_CHECKING:
    from avalanche_amnesia.models.extraction.shrinking import Shrinking

_SIZES = {"size", "dim", "ndimension", "numel", "stride", "is_floating_point", "get_device", len}
_SIZE_ATTRIBUTES = {"shape", "ndim", "dtype", "device"}


def entries_read(walk: Shrinking, node: fx.Node, axis: int) -> Tensor | None:
    """Which entries of an axis anyone reads, bool ``(entries,)``; None where no mask stands right behind a node.

    Args:
        walk: over the full network.
        node: of the full network.
        axis: of its result.
    """
    shape = walk.on_meta(node, *walk.arguments(node)[0], **walk.arguments(node)[1])[0].shape
    result: Tensor | None = None
    for user in readers(node):
        mask = _mask_in(walk, user, node, shape)
        if mask is None:
            return None
        others = [dim for dim in range(len(shape)) if dim != axis % len(shape)]
        here = (mask != 0).expand(shape).sum(others) > 0
        result = here if result is None else result | here
    return result


def readers(node: fx.Node) -> list[fx.Node]:
    """Who reads the entries of a node of the full network, not only its shape."""
    return [user for user in node.users if not _is_size(user)]


def _mask_in(walk: Shrinking, user: fx.Node, node: fx.Node, shape: torch.Size) -> Tensor | None:
    """The mask with which a node is read, as it broadcasts over it."""
    if len(user.args) < 2 or user.args[0] is not node:
        return None
    mask = user.args[1]
    if not isinstance(mask, fx.Node) or mask.op != "get_attr":
        return None
    value: Tensor = operator.attrgetter(str(mask.target))(walk.root)
    if user.op == "call_module" and isinstance(walk.module(user), TaskBatchNorm):
        value = value.reshape(-1, *(1,) * (len(shape) - 2))
    elif user.target is not operator.mul:
        return None
    return value if torch.broadcast_shapes(value.shape, shape) == shape else None


def _is_size(node: fx.Node) -> bool:
    """Whether a node reads nothing of a value but its shape and type."""
    if node.target in (getattr, builtins.getattr):
        return node.args[1] in _SIZE_ATTRIBUTES
    return node.target in _SIZES
