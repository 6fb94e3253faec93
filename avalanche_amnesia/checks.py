"""Checks of arguments, one kind each: an error names the argument, what was given and what is allowed."""

import difflib
import operator
from collections.abc import Iterable
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TypeVar, get_args

T = TypeVar("T")


def one_of(name: str, value: object, choices: object) -> None:
    """Check a choice."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def above(name: str, value: float, bound: float, *, inclusive: bool = False) -> None:
    """Check a number against a lower bound."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not (value >= bound if inclusive else value > bound):
        raise ValueError(f"{name} must be {'at least' if inclusive else 'above'} {bound}, got {value!r}")


def within(name: str, value: object, interval: str) -> None:
    """Check a number against an interval, ``(0, 1]`` say."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    number = isinstance(value, Real) and not isinstance(value, bool)
    ends = [end for end, closed in ((low, interval[0] == "["), (high, interval[-1] == "]")) if closed]
    if not number or not (low < value < high or value in ends):  # type: ignore[operator]
        raise ValueError(f"{name} must lie in {interval}, got {value!r}")


def path(name: str, value: object) -> Path:
    """A path in the file system."""
    if not isinstance(value, (str, PathLike)):
        raise TypeError(f"{name} must be the path of a directory (a str or Path), got {value!r}")
    return Path(value)


def whole_number(name: str, value: object, least: int | None = 1) -> int:
    """A whole number as Python's ``int``."""
    number = integer(value)
    if number is None or (least is not None and number < least):
        allowed = "an int" if least is None else f"an int of at least {least}"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return number


def instance(name: str, value: object, kind: type, way_out: str) -> None:
    """Check what an argument is."""
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r}"
        raise TypeError(f"{name} must be an object of {kind.__name__}, got {given}: {way_out}")


def object_of(name: str, given: T | None, kind: type[T], way_out: str) -> T:
    """Argument that takes an object of a class, by default one with the default settings."""
    result = kind() if given is None else given
    instance(name, result, kind, way_out)
    return result


def optimizer_maker(name: str, value: object) -> None:
    """Check an argument that makes an optimizer, or is None."""
    if value is not None and not callable(value):
        raise TypeError(
            f"{name} must make an optimizer from a list of parameters, got {value!r}: "
            "lambda p: torch.optim.Adam(p, lr=1e-3)"
        )


def integer(value: object) -> int | None:
    """An integer of Python, numpy or torch as Python's ``int``; None for anything else, bools and floats included."""
    if getattr(value, "ndim", 0) != 0:
        return None
    if hasattr(value, "item"):  # numpy's and torch's numbers, neither of which is imported here: --help is quick
        value = value.item()
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def integers(name: str, values: Iterable[object], what: str) -> tuple[int, ...]:
    """Integers of Python, numpy or torch as Python's ``int``."""
    try:
        given = tuple(values)
    except TypeError:
        raise ValueError(f"{name} must be a list of {what} (ints), such as [0, 2], got {values!r}") from None
    numbers = tuple(number for number in map(integer, given) if number is not None)
    if len(numbers) < len(given):
        wrong = [value for value in given if integer(value) is None]
        raise ValueError(f"{name}: {wrong} are no {what}; give a list of ints, such as [0, 2]")
    return numbers


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'relearn'?`` where a name that exists is near, else nothing: the end of an error's message."""
    near = difflib.get_close_matches(word, [*known], 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def known_options(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise for an option that does not exist."""
    names = sorted(known)
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names) or f"; it has {', '.join(names) or 'none'}"
            raise TypeError(f"{owner} has no option {name!r}{hint}")
