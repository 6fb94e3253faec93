"""Recursive search for values in containers and in objects of this package and of Avalanche, but in no other object."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

from avalanche.benchmarks import CLExperience
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.templates.base import BaseTemplate
from torch import nn
from torch.utils.data import Dataset

from avalanche_amnesia.saving.strategy_settings import is_frozen

CONTAINERS = (dict, list, set, deque)
_LEAVES = (str, bytes, int, float, type(None), type, ModuleType)


def is_known(obj: object) -> bool:
    """Return True if a recursive search may visit an object's attributes: its class is from this package or Avalanche.

    False for strategies, networks and data, and for objects that cannot change.
    """
    kind: Any = type(obj)
    return _is_known(kind)


@cache
def _is_known(kind: type) -> bool:
    if issubclass(kind, (BaseTemplate, nn.Module, AvalancheDataset, CLExperience, Dataset)):
        return False
    if is_frozen(kind) or not kind.__dictoffset__:
        return False
    return is_known_class(kind)


def is_known_class(kind: type) -> bool:
    """Return True if Avalanche defines the class, or if this package or ``avalanche.training`` defines a base of it."""
    bases = any(base.__module__.startswith(("avalanche_amnesia.", "avalanche.training.")) for base in kind.__mro__)
    return bases or kind.__module__.startswith("avalanche.")


def known_parts(roots: Iterable[object], seen: dict[int, object]) -> Iterator[Any]:
    """Yield ``roots``, and objects in their containers and attributes, recursively; add each to ``seen`` by its id."""
    todo = deque(roots)
    while todo:
        obj = todo.popleft()
        if id(obj) not in seen:
            seen[id(obj)] = obj  # keeps it alive, so that no id is used twice
            yield obj
            if isinstance(obj, (*CONTAINERS, tuple)):
                todo += (entry for entry in entries_of(obj) if not isinstance(entry, _LEAVES))
            elif is_known(obj):
                todo += (value for value in vars(obj).values() if not isinstance(value, _LEAVES))


def entries_of(part: Any) -> list[Any]:
    """Return the entries of a container as a list; for a dict its keys, then its values."""
    return [*part, *part.values()] if isinstance(part, dict) else list(part)
