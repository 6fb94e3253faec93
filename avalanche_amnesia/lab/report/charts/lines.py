"""Lines over the stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from avalanche_amnesia.lab.report.charts.parts import WIDTH, Axis, Chart, Mark, Tick, places, reach, round_numbers
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import over_seeds


@dataclass(frozen=True)
class Series:
    """Numbers of one role over the stream, as (place, number)."""

    role: str
    name: str
    points: Sequence[tuple[float, Spread]]


@dataclass(frozen=True)
class Line:
    """A series as drawn; ``band`` is empty where there is one run."""

    role: str
    path: str
    band: str
    marks: Sequence[Mark]


@dataclass(frozen=True, kw_only=True)
class LineChart(Chart):
    """Lines over the stream, with requests as vertical lines."""

    kind: ClassVar[str] = "lines"
    left: ClassVar[float] = 52
    right: ClassVar[float] = WIDTH - 12
    top: ClassVar[float] = 20
    height: float = 204.0
    bottom: float = 164.0
    x_label: str = "after task"
    y_label: str
    y_ticks: Sequence[Tick]
    lines: Sequence[Line]
    requests: Sequence[Tick]
    limit: str


def line_chart(
    title: str,
    series: Sequence[Series],
    axis: Axis,
    *,
    after: Sequence[int],
    requests: Sequence[int],
) -> LineChart:
    """Lines over the stream, with a band over the seeds and a grey area up to the higher floor."""
    low, high = reach(value for each in series for _, value in each.points)
    ticks = round_numbers(*(axis.ends or (min(0.0, low), max(0.0, high))))
    x = places((0, max(len(after) - 1, 1)), (LineChart.left + 12, LineChart.right - 12))
    y = places((ticks[0], ticks[-1]), (LineChart.bottom, LineChart.top))
    limit = [(x(place), y(value)) for place, value in _limit(series)]
    told = (f"{each.name}: {', '.join(over_seeds(value, axis.words) for _, value in each.points)}." for each in series)
    return LineChart(
        title=title,
        description=f"{axis.label}, {LineChart.x_label} {', '.join(map(str, after))}. {' '.join(told)}",
        legend=[(each.role, each.name) for each in series] + [("limit", "up to the limit of detection")] * bool(limit),
        x_ticks=[Tick(x(n), str(task)) for n, task in enumerate(after)],
        y_label=axis.label,
        y_ticks=[Tick(y(value), axis.tick_words(value)) for value in ticks],
        lines=[_line(each, x, y, axis.words) for each in series],
        requests=_requests([x(place) for place in requests]),
        limit=_area(limit) if limit else "",
    )


def _line(
    series: Series, x: Callable[[float], float], y: Callable[[float], float], words: Callable[[float], str]
) -> Line:
    points = [(x(place), value) for place, value in series.points]
    upper = [f"{px},{y(value.high)}" for px, value in points]
    lower = [f"{px},{y(value.low)}" for px, value in reversed(points)]
    return Line(
        series.role,
        f"M{' L'.join(f'{px},{y(value.mean)}' for px, value in points)}",
        f"M{' L'.join(upper + lower)} Z" if any(value.low < value.high for _, value in points) else "",
        [Mark(px, y(value.mean), f"{series.name}: {over_seeds(value, words)}") for px, value in points],
    )


def _requests(at: Sequence[float]) -> list[Tick]:
    """Marks of requests, with a word where there is room for it."""
    ticks: list[Tick] = []
    worded = -math.inf
    for place in at:
        room = place - worded > 60
        ticks.append(Tick(place, "request" * room))
        worded = place if room else worded
    return ticks


def _limit(series: Sequence[Series]) -> list[tuple[float, float]]:
    """Limit of detection: the higher floor, wherever one was measured."""
    floors: dict[float, float] = {}
    for each in series:
        if each.role in ("order", "seed"):
            for place, value in each.points:
                floors[place] = max(value.mean, floors.get(place, 0.0))
    return sorted(floors.items())


def _area(line: Sequence[tuple[float, float]]) -> str:
    """Path around what lies below a line; a single place gets some width."""
    if len(line) == 1:
        line = [(line[0][0] - 8, line[0][1]), (line[0][0] + 8, line[0][1])]
    bottom = LineChart.bottom
    return f"M{line[0][0]},{bottom} L{' L'.join(f'{x},{y}' for x, y in line)} L{line[-1][0]},{bottom} Z"
