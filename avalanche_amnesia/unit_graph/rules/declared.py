"""Modules that the user declared: a copy per task, or trained only by the first task."""

from typing import Any

import torch
from torch import fx

from avalanche_amnesia.unit_graph.declared_calls import DECLARED, filled_in
from avalanche_amnesia.unit_graph.masking import call_owned, tensor_in
from avalanche_amnesia.unit_graph.registry import rule
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec
from avalanche_amnesia.unit_graph.units import ALWAYS
from avalanche_amnesia.unit_graph.values import Dependence, ParameterValue, always_in_use
from avalanche_amnesia.unit_graph.walk import Walk


@rule(DECLARED)
def declared(walk: Walk, node: fx.Node, tensors: Any, sizes: Any, number: int) -> Any:
    """One call of a declared module: its results count as always in use."""
    call = walk.exported.calls[number]
    walk.zero_inputs(node, dirty_only=True)
    given: Any = node.args
    args, kwargs = filled_in(call.arguments, [*given[0][1:], *given[1]])
    if call.name in walk.owned:
        walk.draft.owned.setdefault(call.name, OwnedSpec(call.name))
        made = walk.insert_behind(node, call_owned, (walk.tasks_own, call.name, *args), kwargs)
    else:
        _freeze(walk, call.name)
        with walk.graph.inserting_after(node):
            made = walk.graph.call_module(call.name, args, kwargs)
    for user in list(node.users):
        if user is not made:
            user.args = (made, user.args[1])
            user.target = tensor_in
    walk.values[made] = [always_in_use(result.shape, result.dtype) for result in walk.result(node)]
    return walk.values[made]


def _freeze(walk: Walk, name: str) -> None:
    walk.draft.frozen_modules.add(name)
    for inner, parameter in walk.backbone.get_submodule(name).named_parameters():
        always = torch.full((1,) * parameter.dim(), ALWAYS)
        place = torch.arange(parameter.numel()).reshape(parameter.shape)
        part = Dependence(f"{name}.{inner}", parameter.shape, place, frozen=True)
        walk.used(ParameterValue(parameter.shape, parameter.dtype, (part,)), always)
