"""Charts of the report page: coordinates for the template, which draws them at any width, and the numbers as text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.colors import to_hex
from matplotlib.ticker import MaxNLocator

from avalanche_amnesia.evaluation.figures import MAX_CELLS_WITH_NUMBERS, SHARES, WHITE_FROM
from avalanche_amnesia.evaluation.resolution import RESOLUTION
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import over_seeds


@dataclass(frozen=True)
class Axis:
    """A chart axis: label, number formats, limits; a log axis's lowest tick stands for values too small to detect."""

    label: str
    words: Callable[[float], str]
    tick_words: Callable[[float], str]
    ends: tuple[float, float] | None = None
    is_logarithmic: bool = False


Scale = tuple[Sequence[tuple[float, str]], Callable[[float], float]]
"""Ticks of an axis, and a function from a number to its position, both in per cent of the axis's length."""


@dataclass(frozen=True)
class Series:
    """A line of a chart: for each position in the stream, mean, minimum and maximum over seeds."""

    role: str
    name: str
    points: Sequence[tuple[int, Spread]]


@dataclass(frozen=True)
class LineChart:
    """A chart of lines over the stream, with bands for the range over seeds."""

    name: str
    title: str
    series: Sequence[Series]
    axis: Axis
    scale: Scale
    after: Sequence[int]
    requests: Sequence[int]

    @property
    def numbers(self) -> Sequence[str]:
        """Return all numbers of the chart as text, each with the name of its line and the task."""
        return [
            f"{each.name}, after task {self.after[place]}: {over_seeds(value, self.axis.words)}"
            for each in self.series
            for place, value in each.points
        ]

    @property
    def ticks(self) -> Sequence[tuple[float, int]]:
        """Return (position in per cent, task) for at most 15 ticks on the horizontal axis."""
        return [(self.x(at), task) for at, task in enumerate(self.after) if at % math.ceil(len(self.after) / 15) == 0]

    def x(self, index: int) -> float:
        """Return the horizontal position of the ``index``-th task of the stream, in per cent of the chart's width."""
        return round(100 * (index + 0.5) / len(self.after), 2)

    def y(self, value: float) -> float:
        """Return the vertical position of a number, in per cent of the chart's height from the top."""
        return round(100 - self.scale[1](value), 2)

    def line(self, series: Series) -> str:
        """Return the SVG points of a line through the means of a series."""
        return " ".join(f"{self.x(at)},{self.y(value.mean)}" for at, value in series.points)

    def band(self, series: Series) -> str:
        """Return the SVG points around the range of a series over seeds, or an empty string if all seeds are equal."""
        if all(value.low == value.high for _, value in series.points):
            return ""
        above = [f"{self.x(at)},{self.y(value.high)}" for at, value in series.points]
        return " ".join([*above, *(f"{self.x(at)},{self.y(value.low)}" for at, value in reversed(series.points))])


class Cell(NamedTuple):
    """Cell of a matrix: a fraction in [0, 1], lines of small text ``below`` it, and whether the cell is ``framed``."""

    value: float
    below: Sequence[str] = ()
    framed: bool = False


@dataclass(frozen=True)
class Matrix:
    """A chart of fractions by row and column; the larger the fraction, the darker the cell."""

    name: str
    title: str
    rows: Sequence[Any]
    columns: Sequence[Any]
    cells: Sequence[Sequence[Cell | None]]

    @property
    def has_numbers(self) -> bool:
        """Return True if the cells are large enough for printed numbers."""
        return len(self.rows) * len(self.columns) <= MAX_CELLS_WITH_NUMBERS

    @staticmethod
    def colour(value: float) -> str:
        """Return the background colour of a cell with this fraction, as hex."""
        return str(to_hex(SHARES(value)))

    @staticmethod
    def ink(value: float) -> str:
        """Return the colour of the number printed in a cell: white on dark cells, else black."""
        return "#ffffff" if value > WHITE_FROM else "#000000"


def scale_of(axis: Axis, all_series: Sequence[Series]) -> Scale:
    """Return a scale of an axis that contains all numbers of the given series."""
    reach = [end for each in all_series for _, value in each.points for end in (value.low, value.mean, value.high)]
    if axis.is_logarithmic:
        return _logarithmic(axis, reach)
    low, high = axis.ends or (min([0.0, *reach]), max([0.0, *reach]))
    values = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high if high > low else low + 1.0)
    ticks = [round(float(value), 12) for value in values]
    first, length = ticks[0], ticks[-1] - ticks[0]

    def position(value: float) -> float:
        return 100 * (value - first) / length

    return [(round(position(tick), 2), axis.tick_words(tick)) for tick in ticks], position


def _logarithmic(axis: Axis, numbers: Sequence[float]) -> Scale:
    """Return a logarithmic scale for ``numbers``; its lowest tick stands for all numbers too small to detect."""
    there = [value for value in numbers if value >= RESOLUTION] or [1.0]
    first, last = math.floor(math.log10(min(there))), math.ceil(math.log10(max(there)))
    first = min(first, last - 1)
    length = last - first + 1

    def position(value: float) -> float:
        return 0.0 if value < RESOLUTION else 100 * (math.log10(value) - first + 1) / length

    step = math.ceil(length / 5)
    decades = [(round(position(10.0**n), 2), axis.tick_words(10.0**n)) for n in range(last, first - 1, -step)]
    return [(0.0, "below"), *reversed(decades)], position


def legend_of(charts: Sequence[LineChart]) -> Mapping[str, str]:
    """Return the legend of charts: a dict of role (``here``, ``retrained`` …) to name, for all their lines."""
    return {each.role: each.name for chart in charts for each in chart.series}
