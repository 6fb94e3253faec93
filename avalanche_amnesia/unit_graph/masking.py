"""Functions that a rewritten backbone calls to mask its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """``values · mask``, +0 where the mask is 0; no mask: all units are open.

    A product alone leaves −0 of a negative value: the sign of what nobody protects, which ``copysign``, ``signbit``,
    ``atan2`` or a division read as well as any value. Adding +0 takes the sign away, and moves nothing else.
    """
    return values if mask is None else (values * mask.to(values.dtype)).add_(0.0)


def use_of_sets(masks: Sequence[Tensor], members: Tensor) -> Tensor:
    """Use of sets of units, ``(sets,)``: the maximum over their members.

    Args:
        masks: one per layer, in the order in which units are numbered.
        members: ``(largest set, sets)``: numbers of units; one past the last for "always", two past it for "nothing".
    """
    known = torch.cat([*masks, masks[0].new_tensor([1.0, 0.0])])
    return known[members].amax(0)


def call_owned(own: Mapping[str, nn.Module], name: str, *args: Any, **kwargs: Any) -> Any:
    """Run the task's own copy of a module."""
    return own[name](*args, **kwargs)


def owned_parameter(own: Mapping[str, nn.Module], name: str) -> Tensor:
    """The task's own copy of a parameter."""
    return next(own[name].parameters())


def tensor_in(result: Any, number: int) -> Tensor:
    """One of the tensors in what a declared module returned: a tensor, a tuple, a mapping or the like."""
    found: Tensor = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)][number]
    return found
