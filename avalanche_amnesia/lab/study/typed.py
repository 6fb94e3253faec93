"""Convert plain JSON and YAML values to declared types, and check them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from avalanche_amnesia import checks
from avalanche_amnesia.checks import did_you_mean

_SCALARS = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


def typed(kind: Any, value: Any, place: str = "") -> Any:
    """Convert a JSON value to the type ``kind``, mappings to data classes; errors name ``place``.

    ``Annotated[str, names]`` allows these names and ``module:name`` for an object of the user's own;
    ``Annotated[int, 1]`` allows integers of at least 1.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated and arguments[0] is int:
        return checks.whole_number(place, value, arguments[1])
    if origin is Annotated:
        return known_name(typed(arguments[0], value, place), arguments[1], place)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        return typed(next(option for option in arguments if option is not NoneType), value, place)
    if is_dataclass(kind) and isinstance(kind, type):
        return _made(kind, _checked(value, Mapping, "a mapping", place), place)
    if origin is list:
        items = _checked(value, (list, tuple), "a list", place)
        return [typed(arguments[0], item, f"{place}[{at}]") for at, item in enumerate(items)]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        name_of: Any = arguments[0] if arguments[0] is int else str  # JSON's keys are strings
        items = _checked(value, Mapping, "a mapping", place)
        return {name_of(name): typed(arguments[1], item, _inside(place, name)) for name, item in items.items()}
    if not is_of(kind, value):
        near = did_you_mean(str(value), map(str, arguments)) if origin is Literal else ""
        raise ValueError(f"{place} must be {shown(kind)}, got {value!r}{near}")
    return value


def known_name(name: str, names: Iterable[str], place: str) -> str:
    """Return a name that is one of ``names`` or ``module:name``; raise ValueError for any other."""
    if ":" not in name and name not in names:
        allowed = f"{', '.join(map(repr, names))}, or MODULE:NAME of your own"
        raise ValueError(f"{place} must be one of {allowed}, got {name!r}{did_you_mean(name, names)}")
    return name


def is_of(kind: Any, value: Any) -> bool:
    """Return True if a JSON value has the type ``kind``, or if ``kind`` is not for numbers, text, lists or choices."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(is_of(option, value) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and all(is_of(arguments[0], item) for item in value)
    if kind is NoneType:
        return value is None
    return kind not in _SCALARS or (isinstance(value, _SCALARS[kind]) and isinstance(value, bool) == (kind is bool))


def shown(kind: Any) -> str:
    """Return a type as text for an error message, such as ``int or a list of float``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(shown, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (list, tuple, Sequence):
        return f"a list of {shown(arguments[0])}"
    return "null" if kind is NoneType else getattr(kind, "__name__", str(kind))


def _made(kind: type, values: Mapping[str, Any], place: str) -> Any:
    """Return an instance of a data class from a mapping of field names to values; raise ValueError for wrong names."""
    hints, owner = get_type_hints(kind, include_extras=True), place or kind.__name__
    for name in values:
        if name not in hints:
            near = did_you_mean(name, hints) or f"; it has {', '.join(hints)}"
            raise ValueError(f"{owner} has no {name}{near}")
    needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{owner} lacks {', '.join(missing)}; it needs {', '.join(needed)}")
    return kind(**{name: typed(hints[name], value, _inside(place, name)) for name, value in values.items()})


def _checked(value: Any, allowed: Any, what: str, place: str) -> Any:
    if not isinstance(value, allowed):
        raise ValueError(f"{place} must be {what}, got {value!r}")
    return value


def _inside(place: str, name: object) -> str:
    return f"{place}.{name}" if place else str(name)
