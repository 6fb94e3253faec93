"""Arguments of a graph's nodes: leaves in tuples, lists, mappings and slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def leaves(tree: Any) -> list[Any]:
    """Leaves, which are no containers, in order."""
    if isinstance(tree, (tuple, list)):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    if isinstance(tree, slice):
        return [leaf for part in (tree.start, tree.stop, tree.step) for leaf in leaves(part)]
    return [tree]


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same containers around other leaves."""
    if isinstance(tree, list):
        return [map_leaves(part, function) for part in tree]
    if isinstance(tree, tuple):
        parts = [map_leaves(part, function) for part in tree]
        # `torch.max(x, 1).values`: what torch returns under names keeps them
        return type(tree)(parts) if type(tree).__module__ == "torch.return_types" else tuple(parts)
    if isinstance(tree, Mapping):
        return {name: map_leaves(part, function) for name, part in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_leaves(part, function) for part in (tree.start, tree.stop, tree.step)))
    return function(tree)
