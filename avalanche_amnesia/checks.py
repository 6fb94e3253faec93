"""Checks of arguments, one kind each: an error names the argument, what was given and what is allowed."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from typing import get_args

import numpy as np
from torch import Tensor


def one_of(name: str, value: object, choices: object) -> None:
    """Check a choice.

    Args:
        name: of the argument.
        value: that was given.
        choices: a ``Literal`` of the allowed values.

    Raises:
        ValueError: for any other value.
    """
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def above(name: str, value: float, bound: float, *, inclusive: bool = False) -> None:
    """Check a number against a lower bound.

    Args:
        name: of the argument.
        value: that was given.
        bound: the number must be above it.
        inclusive: or equal to it.

    Raises:
        ValueError: for a smaller number, NaN, or what is no number.
    """
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not (value >= bound if inclusive else value > bound):
        raise ValueError(f"{name} must be {'at least' if inclusive else 'above'} {bound}, got {value!r}")


def whole_number(name: str, value: object, least: int | None = 1) -> int:
    """A whole number as Python's ``int``.

    Args:
        name: of the argument.
        value: an integer of Python, numpy or torch (no dimension); no bool and no float, not even 2.0.
        least: the smallest number allowed; None: any.

    Raises:
        ValueError: for anything else.
    """
    number = integer(value)
    if number is None or (least is not None and number < least):
        allowed = "an int" if least is None else f"an int of at least {least}"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return number


def instance(name: str, value: object, kind: type, way_out: str) -> None:
    """Check what an argument is.

    Args:
        name: of the argument.
        value: that was given.
        kind: the class that it must be an object of.
        way_out: what to write instead, for the message.

    Raises:
        TypeError: for an object of another class, or the class itself.
    """
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r}"
        raise TypeError(f"{name} must be an object of {kind.__name__}, got {given}: {way_out}")


def integer(value: object) -> int | None:
    """An integer of Python, numpy or torch as Python's ``int``; None for anything else, bools and floats included."""
    if isinstance(value, (bool, np.bool_)) or getattr(value, "ndim", 0) != 0:
        return None
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.item()
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def integers(name: str, values: Iterable[object], what: str) -> tuple[int, ...]:
    """Integers of Python, numpy or torch as Python's ``int``.

    Args:
        name: of the argument.
        values: one after the other, in any container.
        what: they are, in the plural, for the message.

    Raises:
        ValueError: if there is nothing to go through, or anything else is among them, bools and floats included.
    """
    try:
        given = tuple(values)
    except TypeError:
        raise ValueError(f"{name} must be a list of {what} (ints), such as [0, 2], got {values!r}") from None
    numbers = tuple(number for number in map(integer, given) if number is not None)
    if len(numbers) < len(given):
        wrong = [value for value in given if integer(value) is None]
        raise ValueError(f"{name}: {wrong} are no {what}; give a list of ints, such as [0, 2]")
    return numbers


def known_options(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise for an option that does not exist.

    Args:
        given: names of options.
        known: those that exist.
        owner: what has them, for the message.

    Raises:
        TypeError: naming the option, and the nearest one that exists.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(names)}"
            raise TypeError(f"{owner} has no option {name!r}: {hint}")
