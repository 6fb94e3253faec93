"""Type checks for values read from a saved state."""

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")


class StateError(ValueError):
    """Error for a state that cannot be saved, is damaged, or belongs to a different strategy."""


def checked(state: Any, /, **kinds: Any) -> list[Any]:
    """Check that a state dict has the names and types ``kinds``, and return its values in that order; or StateError."""
    if not isinstance(state, dict) or state.keys() != kinds.keys():
        held = list(state) if isinstance(state, dict) else state
        raise StateError(f"invalid value in state: {held!r:.200} where {list(kinds)} should be")
    for name, kind in kinds.items():
        if not has_type(state[name], kind):
            raise StateError(f"invalid value in state at {name}: {state[name]!r:.200}")
    return [state[name] for name in kinds]


def create(kind: type[Made], state: Any) -> Made:
    """Create an object of the data class ``kind`` from its attributes ``state``, after checking their types."""
    return kind(*checked(state, **_fields(kind)))  # type: ignore[arg-type]


@lru_cache(None)  # asked for every head of every task
def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)  # those of class variables among them
    return {attribute.name: hints[attribute.name] for attribute in fields(kind)}


def has_type(value: Any, kind: Any) -> bool:
    """Return True if a value (and each item of a container) fits the type hint ``kind``, e.g. ``list[int] | None``."""
    if kind is Any:
        return True
    outer, inner = _parts(kind)
    if outer in (Union, UnionType):  # equal keys of the cache
        return any(has_type(value, option) for option in inner)
    if not isinstance(value, outer):
        return False
    if not inner:
        return True
    if isinstance(value, Mapping):
        return all(has_type(key, inner[0]) and has_type(item, inner[1]) for key, item in value.items())
    if isinstance(value, tuple) and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(has_type, value, inner))
    return all(has_type(item, inner[0]) for item in value)


@lru_cache(None)
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind) or kind, get_args(kind)
