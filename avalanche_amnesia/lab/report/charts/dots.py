"""Dots on a scale, a row per strategy or task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from avalanche_amnesia.lab.report.charts.parts import WIDTH, Axis, Chart, Mark, Tick, places, reach, round_numbers
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import over_seeds


@dataclass(frozen=True)
class Row:
    """A row of a dot chart: words above a track, marks (role, mark) on it, from where to where our seeds reach."""

    text: str
    y: float
    marks: Sequence[tuple[str, Mark]]
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class DotChart(Chart):
    """Marks of several roles on one scale, a row per strategy or task."""

    kind: ClassVar[str] = "dots"
    left: ClassVar[float] = 12
    right: ClassVar[float] = WIDTH - 16
    rows: Sequence[Row]


def dot_chart(
    title: str, rows: Sequence[tuple[str, Mapping[str, Spread]]], names: Mapping[str, str], axis: Axis
) -> DotChart:
    """Marks on one scale, a row each."""
    scale: Callable[[float], float] = float if axis.ends else math.log10
    if axis.ends:
        ticks = round_numbers(*axis.ends)
    else:
        low, high = map(math.log10, reach(value for _, marks in rows for value in marks.values()))
        first = math.floor(low)
        ticks = [10.0**power for power in range(first, max(math.ceil(high), first + 1) + 1)]
    on_axis = places((scale(ticks[0]), scale(ticks[-1])), (DotChart.left, DotChart.right))

    def x(value: float) -> float:
        return on_axis(scale(value))

    drawn = []
    for n, (text, marks) in enumerate(rows):
        y = 34.0 + 40 * n
        placed = [
            (role, Mark(x(value.mean), y, f"{names[role]}: {over_seeds(value, axis.words)}"))
            for role, value in sorted(marks.items(), key=lambda item: item[0] == "here")  # ours is drawn last, on top
        ]
        here = marks.get("here")
        drawn.append(Row(text, y, placed, x(here.low) if here else 0, x(here.high) if here else 0))
    told = (
        f"{text}: {', '.join(f'{names[role]} {over_seeds(value, axis.words)}' for role, value in marks.items())}."
        for text, marks in rows
    )
    bottom = 40.0 * len(rows) + 10
    return DotChart(
        title=title,
        description=f"{axis.label}. {' '.join(told)}",
        legend=[(role, name) for role, name in names.items() if any(role in marks for _, marks in rows)],
        height=bottom + 36,
        bottom=bottom,
        x_label=axis.label,
        x_ticks=[Tick(x(value), axis.tick_words(value)) for value in ticks],
        rows=drawn,
    )
