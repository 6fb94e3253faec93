"""Parts that several kinds of charts share: sizes, axes, ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from avalanche_amnesia.lab.report.reading import Spread

WIDTH = 360
"""Units of most charts; about the pixels of a phone, so that text keeps its size there."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A number's place, and its words for those who point at it."""

    x: float
    y: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Parts of every chart."""

    title: str
    description: str
    legend: Sequence[tuple[str, str]]
    width: float = WIDTH
    height: float
    bottom: float
    x_label: str
    x_ticks: Sequence[Tick]


@dataclass(frozen=True)
class Axis:
    """An axis of numbers."""

    label: str
    words: Callable[[float], str]
    tick_words: Callable[[float], str]
    ends: tuple[float, float] | None = None


def places(numbers: tuple[float, float], ends: tuple[float, float]) -> Callable[[float], float]:
    """Places of numbers on a line, to a tenth of a unit."""
    (low, high), (start, end) = numbers, ends
    return lambda number: round(start + (number - low) / (high - low) * (end - start), 1)


def reach(spreads: Iterable[Spread]) -> tuple[float, float]:
    """Lowest and highest of several numbers over seeds."""
    found = list(spreads)
    return min(value.low for value in found), max(value.high for value in found)


def round_numbers(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers at equal distances that enclose a range."""
    if high <= low:
        high = low + 1.0
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * n, 12) for n in range(first, max(last, first + 1) + 1)]
