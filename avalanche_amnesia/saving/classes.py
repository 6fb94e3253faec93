"""Classes whose objects a saved state may make anew, by name."""

from __future__ import annotations

from typing import TypeVar

_Class = TypeVar("_Class", bound=type)
_SAVEABLE: dict[str, type] = {}


def saveable(kind: _Class) -> _Class:
    """Let loading make objects of a class: from their attributes, without calling anything of it.

    A class decorator, for plain values that a plugin gathers over its tasks. What a strategy already has when it is
    built (its plugins, their options) needs none: loading gives these their values back in place.

    Args:
        kind: a class whose objects are their attributes, and whose attributes may come from a file that somebody else
            has written. Of a ``dict`` the items count too.
    """
    _SAVEABLE[name_of(kind)] = kind
    return kind


def saveable_class(name: str) -> type | None:
    """The class of a name, None where loading makes none of it."""
    return _SAVEABLE.get(name)


def name_of(kind: type) -> str:
    """Module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
