"""Modules that the user declared: a copy per task, or trained by the first task alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from avalanche_amnesia.models.masking import call_owned
from avalanche_amnesia.models.registry import Fallback, rule
from avalanche_amnesia.models.task_owned import OwnedSpec
from avalanche_amnesia.models.units import ALWAYS
from avalanche_amnesia.models.values import ParameterValue
from avalanche_amnesia.models.walk import Walk


@rule(Fallback.DECLARED_MODULE)
def declared(walk: Walk, node: fx.Node, *args: Any, **options: Any) -> Any:
    """Whatever it computes: its result counts as always in use."""
    name = str(node.target)
    result = walk.anything(node)
    if name in walk.owned_modules:
        walk.book.owned.setdefault(name, OwnedSpec(name))
        with walk.graph.inserting_after(node):
            own = walk.graph.call_function(call_owned, (walk.tasks_own, name, *node.args), dict(node.kwargs))
        node.replace_all_uses_with(own)
        walk.values[own] = result
        return result
    walk.book.frozen_modules.add(name)
    for inner, parameter in walk.module(node).named_parameters():
        whole = walk.whole(f"{name}.{inner}")
        always = torch.full((1,) * parameter.dim(), ALWAYS)
        walk.used(ParameterValue(whole.name, whole.index, whole.dtype, frozen=True), always)
    return result
