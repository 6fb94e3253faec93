"""Checks of arguments: each error names the argument, the given value and the allowed values."""

import difflib
import json
import operator
from collections.abc import Iterable
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_args

T = TypeVar("T")


def one_of(name: str, value: object, choices: object) -> None:
    """Raise ValueError unless ``value`` is one of the values of the ``Literal`` type ``choices``."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def above(name: str, value: float, bound: float, *, inclusive: bool = False) -> None:
    """Raise ValueError unless ``value`` is a number above ``bound``, or equal to ``bound`` if ``inclusive`` is True."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not (value >= bound if inclusive else value > bound):
        raise ValueError(f"{name} must be {'at least' if inclusive else 'above'} {bound}, got {value!r}")


def within(name: str, value: object, interval: str) -> None:
    """Raise ValueError unless ``value`` is a number in an interval such as ``(0, 1]``."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    number = isinstance(value, Real) and not isinstance(value, bool)
    ends = [end for end, closed in ((low, interval[0] == "["), (high, interval[-1] == "]")) if closed]
    if not number or not (low < value < high or value in ends):  # type: ignore[operator]
        raise ValueError(f"{name} must lie in {interval}, got {value!r}")


def path(name: str, value: object) -> Path:
    """Return ``value`` as a ``Path``; raise TypeError if it is neither a str nor a path."""
    if not isinstance(value, (str, PathLike)):
        raise TypeError(f"{name} must be the path of a directory (a str or Path), got {value!r}")
    return Path(value)


def whole_number(name: str, value: object, least: int | None = 1) -> int:
    """Return ``value`` as an ``int``; raise ValueError if it is not an integer or is below ``least``."""
    number = integer(value)
    if number is None or (least is not None and number < least):
        allowed = "an int" if least is None else f"an int of at least {least}"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return number


def instance(name: str, value: object, kind: type, remedy: str) -> None:
    """Raise TypeError unless ``value`` is an instance of ``kind``; the message ends with the text ``remedy``."""
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r}"
        raise TypeError(f"{name} must be an object of {kind.__name__}, got {given}: {remedy}")


def object_of(name: str, given: T | None, kind: type[T], remedy: str) -> T:
    """Return ``given``, or ``kind()`` if it is None; raise TypeError, ending with ``remedy``, for another class."""
    result = kind() if given is None else given
    instance(name, result, kind, remedy)
    return result


def integer(value: object) -> int | None:
    """Return an integer of Python, numpy or torch as an ``int``, or None for any other value, also bools and floats."""
    if getattr(value, "ndim", 0) != 0:
        return None
    if hasattr(value, "item"):  # a number of numpy or torch; importing either would slow down --help
        value = value.item()
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def integers(name: str, values: Iterable[object], what: str, error: type[ValueError] = ValueError) -> tuple[int, ...]:
    """Return integers of Python, numpy or torch as a tuple of ``int``; raise ``error`` if another value is given."""
    try:
        given = tuple(values)
    except TypeError:
        raise error(f"{name} must be a list of {what} (ints), such as [0, 2], got {values!r}") from None
    numbers = tuple(number for number in map(integer, given) if number is not None)
    if len(numbers) < len(given):
        wrong = [value for value in given if integer(value) is None]
        raise error(f"{name}: {wrong} are no {what}; give a list of ints, such as [0, 2]")
    return numbers


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for an error message, ``; did you mean 'relearn'?``; empty if no known name resembles ``word``."""
    near = difflib.get_close_matches(word, [*known], 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def known_options(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise TypeError if a name in ``given`` is not one of the ``known`` options of ``owner``."""
    names = sorted(known)
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names) or f"; it has {', '.join(names) or 'none'}"
            raise TypeError(f"{owner} has no option {name!r}{hint}")


def json_of(text: str) -> Any:
    """Return parsed JSON; raise ValueError if an object repeats a key, because parsers differ in which value counts."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"it names {next(name for name in names if names.count(name) > 1)!r} twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
