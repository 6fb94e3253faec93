"""Rules for modules that were declared frozen or task-owned: taken along as they are."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.contrib.export.layout import Live
from avalanche_amnesia.contrib.export.parts import taken_along
from avalanche_amnesia.contrib.export.shrinking import Shrinking, shrinks
from avalanche_amnesia.unit_graph.masking import tensor_in
from avalanche_amnesia.unit_graph.values import leaves, map_leaves


@dataclass(frozen=True)
class Returned:
    """Result of a declared module: its node, and the place of each tensor in it; None where that is not known."""

    node: fx.Node
    places: list[tuple[Any, ...]] | None


def run_whole(walk: Shrinking, node: fx.Node, name: str, module: nn.Module, args: Any, kwargs: Any) -> Returned:
    """The call of a module on whole values."""
    if any(isinstance(leaf, Live) and leaf.axis is not None for leaf in leaves((args, kwargs))):
        walk.note_whole(type(module).__name__)
    whole = map_leaves((args, kwargs), lambda x: walk.whole(x) if isinstance(x, Live) else x)
    skipped = len(node.args) - len(args)
    given = fx.node.map_arg((node.args[skipped:], node.kwargs), walk.zeros)
    with torch.no_grad():
        places = _places(taken_along(module)(*given[0], **given[1]))
    called = walk.parts.put_module(name, ("declared", name), taken_along(module))
    return Returned(walk.new.call_module(called, *map_leaves(whole, walk.as_node)), places)


def _places(result: Any) -> list[tuple[Any, ...]] | None:
    if isinstance(result, Tensor):
        return [()]
    if type(result) not in (tuple, list, dict):
        return [] if not hasattr(result, "__dict__") and not isinstance(result, (tuple, list, Mapping)) else None
    found: list[tuple[Any, ...]] = []
    for key, part in result.items() if isinstance(result, dict) else enumerate(result):
        inner = _places(part)
        if inner is None:
            return None
        found += [(key, *place) for place in inner]
    return found


@shrinks("call_module")
def frozen(walk: Shrinking, node: fx.Node, *args: Any, **kwargs: Any) -> Returned:
    """A module that only the first task trained."""
    return run_whole(walk, node, str(node.target), walk.backbone.get_submodule(str(node.target)), args, kwargs)


@shrinks(tensor_in)
def one_of_several(walk: Shrinking, node: fx.Node, result: Returned, number: int) -> Live:
    """One of the tensors that a module returned."""
    here = result.node
    if result.places is None:  # a type of the user's own, which only this package's function can take apart
        here = walk.new.call_function(tensor_in, (here, number))
    else:
        for key in result.places[number]:
            here = walk.new.call_function(operator.getitem, (here, key))
    return Live(here, walk.values[node].shape)
