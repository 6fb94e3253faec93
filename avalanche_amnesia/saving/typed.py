"""Convert plain JSON and YAML values to declared types, and check them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from avalanche_amnesia import checks
from avalanche_amnesia.checks import did_you_mean

_SCALARS: dict[Any, Any] = {int: int, float: (int, float), str: str, bool: bool, NoneType: NoneType}


def to_type(kind: Any, value: Any, path: str = "") -> Any:
    """Convert a JSON value to ``kind``, e.g. a mapping to a data class; else raise ValueError that names ``path``.

    ``Annotated[str, names]`` allows these names and ``module:name`` for an object of the user's own;
    ``Annotated[int, 1]`` allows integers of at least 1. Other types, such as ``Any`` or ``dict``, are not checked.
    """
    if type(value) is kind:  # as most values of records
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated and arguments[0] is int:
        return checks.whole_number(path, value, arguments[1])
    if origin is Annotated:
        return known_name(to_type(arguments[0], value, path), arguments[1], path)
    if is_dataclass(kind) and isinstance(kind, type) and not isinstance(value, kind):
        return _make(kind, _check_type(value, Mapping, "a mapping", path), path)
    if origin in (list, tuple, Sequence):
        items = _check_type(value, (list, tuple), "a list", path)
        made = [to_type(arguments[0], item, f"{path}[{at}]") for at, item in enumerate(items)]
        return tuple(made) if origin is tuple else made
    if isinstance(origin, type) and issubclass(origin, Mapping):
        name_of: Any = arguments[0] if arguments[0] is int else str  # JSON's keys are strings
        items = _check_type(value, Mapping, "a mapping", path)
        return {name_of(name): to_type(arguments[1], item, _join(path, name)) for name, item in items.items()}
    if origin in (Union, UnionType):
        for option in arguments:
            with suppress(ValueError):
                return to_type(option, value, path)
    elif value in arguments if origin is Literal else _fits_type(kind, value):
        return value
    near = did_you_mean(str(value), map(str, arguments)) if origin is Literal else ""
    raise ValueError(f"{path} must be {type_as_text(kind)}, got {value!r}{near}")


def _fits_type(kind: Any, value: Any) -> bool:
    """Return True if a value has the type ``kind``; only scalar types (number, text, None) are checked."""
    allowed = _SCALARS.get(kind, object)
    return isinstance(value, allowed) and (allowed is object or isinstance(value, bool) == (kind is bool))


def known_name(name: str, names: Iterable[str], path: str) -> str:
    """Return ``name`` if it is one of ``names`` or has the form ``module:name``; else raise ValueError."""
    if ":" not in name and name not in names:
        allowed = f"{', '.join(map(repr, names))}, or MODULE:NAME of your own"
        raise ValueError(f"{path} must be one of {allowed}, got {name!r}{did_you_mean(name, names)}")
    return name


def type_as_text(kind: Any) -> str:
    """Return a type as text for an error message, such as ``int or a list of float``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(type_as_text, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (list, tuple, Sequence):
        return f"a list of {type_as_text(arguments[0])}"
    return "null" if kind is NoneType else getattr(kind, "__name__", str(kind))


_hints = lru_cache(None)(get_type_hints)  # asked for every record of every run


def _make(kind: type, values: Mapping[str, Any], path: str) -> Any:
    """Return an instance of a data class from a mapping of field names to values; raise ValueError for wrong names."""
    hints, owner = _hints(kind, include_extras=True), path or kind.__name__
    for name in values:
        if name not in hints:
            near = did_you_mean(name, hints) or f"; it has {', '.join(hints)}"
            raise ValueError(f"{owner} has no {name}{near}")
    needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{owner} lacks {', '.join(missing)}; it needs {', '.join(needed)}")
    return kind(**{name: to_type(hints[name], value, _join(path, name)) for name, value in values.items()})


def _check_type(value: Any, allowed: Any, what: str, path: str) -> Any:
    if not isinstance(value, allowed):
        raise ValueError(f"{path} must be {what}, got {value!r}")
    return value


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
