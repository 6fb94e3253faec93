"""Parameters that get no gradient for a while, left out of an optimizer's groups and put back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

Resting = list["list[int | str] | None"]
"""An optimizer's groups: ``id`` of each parameter, or its name where it rests: none is kept alive. None: none rests."""


def groups_by_name(optimizer: Optimizer, resting: Mapping[int, str]) -> Resting:
    """Groups of an optimizer, with the names of those that are to rest in their places.

    Nothing rests of a group of which nothing would be left: an optimizer of the user's may rely on its first parameter.
    """
    groups = [[resting.get(id(p), id(p)) for p in group["params"]] for group in optimizer.param_groups]
    return [None if all(isinstance(p, str) for p in held) else held for held in groups]


def let_rest(optimizer: Optimizer, groups: Resting) -> None:
    """Take named parameters out of an optimizer's groups for a while: its step and ``zero_grad`` look at every one."""
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        if held is not None:
            group["params"] = [p for p, kept in zip(group["params"], held, strict=True) if not isinstance(kept, str)]


def end_rest(optimizer: Optimizer, groups: Resting, parameters: Mapping[str, nn.Parameter]) -> None:
    """Put back what :func:`let_rest` took out, as far as it is still there. May be interrupted, and repeated."""
    for group, held in zip(optimizer.param_groups, groups, strict=False):  # groups that came since need nothing
        if held is None:
            continue
        here = {id(p): p for p in group["params"]}
        found = [parameters.get(p) if isinstance(p, str) else here.get(p) for p in held]
        back = [p for p in found if p is not None]
        known = {id(p) for p in back}
        group["params"] = back + [p for p in group["params"] if id(p) not in known]
