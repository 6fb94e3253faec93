"""Charts of the page: numbers with their places on it, drawn by the template in any width, and the same in words."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import to_hex
from matplotlib.ticker import MaxNLocator

from avalanche_amnesia.evaluation.figures import SHARES, WHITE_FROM, Cell
from avalanche_amnesia.evaluation.resolution import RESOLUTION
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import over_seeds

_MOST_CELLS = 400
"""Numbers that a matrix shows; of a larger one the colours are seen."""
_MOST_LINES = 40
"""Rows and columns of a matrix: of more, only every so many-th is drawn."""


@dataclass(frozen=True)
class Axis:
    """An axis of numbers; a logarithmic one begins with what is below detection."""

    label: str
    words: Callable[[float], str]
    tick_words: Callable[[float], str]
    ends: tuple[float, float] | None = None
    is_logarithmic: bool = False

    @property
    def highest(self) -> float:
        """Largest number there can be."""
        return math.inf if self.ends is None else self.ends[1]


@dataclass(frozen=True)
class Scale:
    """Places on an axis, in per cent of its length."""

    ticks: Sequence[tuple[float, str]]
    place: Callable[[float], float]


@dataclass(frozen=True)
class Series:
    """Numbers of one role over the stream, as (place, number)."""

    role: str
    name: str
    points: Sequence[tuple[int, Spread]]


@dataclass(frozen=True)
class LineChart:
    """Lines over the stream, with a band over the seeds."""

    name: str
    title: str
    series: Sequence[Series]
    axis: Axis
    scale: Scale
    after: Sequence[int]
    requests: Sequence[int]

    @property
    def numbers(self) -> Sequence[str]:
        """All numbers in words."""
        return [
            f"{each.name}, after task {self.after[place]}: {over_seeds(value, self.axis.words)}"
            for each in self.series
            for place, value in each.points
        ]

    @property
    def places(self) -> Sequence[tuple[float, int]]:
        """Place and task of the marks on the horizontal axis, of many only so many as stay apart."""
        step = math.ceil(len(self.after) / 15)
        return [(self.x(at), task) for at, task in enumerate(self.after) if at % step == 0]

    def x(self, place: int) -> float:
        """Place of a task, in per cent of the width."""
        return round(100 * (place + 0.5) / len(self.after), 2)

    def y(self, value: float) -> float:
        """Place of a number, in per cent of the height from above."""
        return round(100 - self.scale.place(value), 2)

    def line(self, each: Series) -> str:
        """Points of a line of means."""
        return " ".join(f"{self.x(at)},{self.y(value.mean)}" for at, value in each.points)

    def band(self, each: Series) -> str:
        """Points around all seeds; none where all are equal."""
        if all(value.low == value.high for _, value in each.points):
            return ""
        above = [f"{self.x(at)},{self.y(value.high)}" for at, value in each.points]
        return " ".join([*above, *(f"{self.x(at)},{self.y(value.low)}" for at, value in reversed(each.points))])


@dataclass(frozen=True)
class Matrix:
    """Shares by row and column, dark where they are large."""

    name: str
    title: str
    rows: Sequence[Any]
    columns: Sequence[Any]
    cells: Sequence[Sequence[Cell | None]]
    corner: str

    def __post_init__(self) -> None:
        """Check that every row and column has its name."""
        if len(self.cells) != len(self.rows) or any(len(row) != len(self.columns) for row in self.cells):
            raise ValueError(f"{len(self.rows)} × {len(self.columns)} names do not fit the cells of {self.title}")

    @property
    def has_numbers(self) -> bool:
        """Tell whether there is room for numbers."""
        return len(self.rows) * len(self.columns) <= _MOST_CELLS

    @property
    def steps(self) -> tuple[int, int]:
        """Every how many-th row and column is drawn."""
        return math.ceil(len(self.rows) / _MOST_LINES), math.ceil(len(self.columns) / _MOST_LINES)

    @property
    def room(self) -> float:
        """Width of the longest row's name, in lines' heights."""
        return max(4.0, 0.5 * max(len(str(row)) for row in self.rows))

    @staticmethod
    def colour(value: float) -> str:
        """Colour of a cell."""
        return str(to_hex(SHARES(value)))

    @staticmethod
    def ink(value: float) -> str:
        """Colour of a number in it."""
        return "#ffffff" if value > WHITE_FROM else "#000000"


def scale_of(axis: Axis, all_series: Sequence[Series]) -> Scale:
    """A scale that all of these numbers are within."""
    reach = [end for each in all_series for _, value in each.points for end in (value.low, value.mean, value.high)]
    if axis.is_logarithmic:
        return _logarithmic(axis, reach)
    low, high = axis.ends or (min([0.0, *reach]), max([0.0, *reach]))
    values = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high if high > low else low + 1.0)
    ticks = [round(float(value), 12) for value in values]
    first, length = ticks[0], ticks[-1] - ticks[0]

    def place(value: float) -> float:
        return 100 * (value - first) / length

    return Scale([(round(place(tick), 2), axis.tick_words(tick)) for tick in ticks], place)


def _logarithmic(axis: Axis, reach: Sequence[float]) -> Scale:
    """Decades up to the largest number, and a step below them for what is below detection."""
    there = [value for value in reach if value >= RESOLUTION] or [1.0]
    first, last = math.floor(math.log10(min(there))), math.ceil(math.log10(max(there)))
    first = min(first, last - 1)
    length = last - first + 1

    def place(value: float) -> float:
        return 0.0 if value < RESOLUTION else 100 * (math.log10(value) - first + 1) / length

    step = math.ceil(length / 5)
    decades = [(round(place(10.0**n), 2), axis.tick_words(10.0**n)) for n in range(last, first - 1, -step)]
    return Scale([(0.0, "below"), *reversed(decades)], place)


def legend_of(charts: Sequence[LineChart]) -> Mapping[str, str]:
    """Role → name of every line of some charts."""
    return {each.role: each.name for chart in charts for each in chart.series}
