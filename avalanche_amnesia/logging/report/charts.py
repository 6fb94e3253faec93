"""Charts as geometry: places and words of everything that the templates draw as SVG.

Colours, dashes and shapes of marks belong to roles (``here``, ``retrained``, ``never``, ``chance``, ``order``,
``seed``), which mean the same in every chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from avalanche_amnesia.logging.report.reading import Spread
from avalanche_amnesia.logging.report.wording import over_seeds

WIDTH = 360
"""Units of every chart; about the pixels of a phone, so that text keeps its size there."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 20, 40


@dataclass(frozen=True)
class Series:
    """Numbers of one role over the stream, as (place, number)."""

    role: str
    name: str
    points: Sequence[tuple[float, Spread]]


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


@dataclass(frozen=True)
class Line:
    """A series as drawn; ``band`` is empty where there is one run."""

    role: str
    name: str
    path: str
    band: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Chart:
    """Parts of every chart: title, description for screen readers, size, legend."""

    title: str
    description: str
    height: float
    legend: Sequence[tuple[str, str]] = ()
    width: float = WIDTH


@dataclass(frozen=True)
class LineChart(Chart):
    """Lines over the stream, with requests as vertical lines."""

    kind: str = "lines"
    x_label: str = ""
    y_label: str = ""
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    lines: Sequence[Line] = ()
    requests: Sequence[Tick] = ()
    limit: str = ""
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = 0


@dataclass(frozen=True)
class Row:
    """A row of a dot chart: words above a track, marks (role, mark) on it."""

    text: str
    y: float
    marks: Sequence[tuple[str, Mark]]
    low: float
    high: float


@dataclass(frozen=True)
class DotChart(Chart):
    """Marks of several roles on one scale, a row per strategy or task."""

    kind: str = "dots"
    x_label: str = ""
    x_ticks: Sequence[Tick] = ()
    rows: Sequence[Row] = ()
    left: float = 12
    right: float = WIDTH - 16
    bottom: float = 0


@dataclass(frozen=True)
class Cell:
    """A cell of a matrix: colour by value, text in the colour that is easier to read on it."""

    x: float
    y: float
    text: str
    below: Sequence[str]
    fill: str
    ink: str
    framed: bool
    words: str


@dataclass(frozen=True)
class Matrix(Chart):
    """Cells of rows and columns."""

    kind: str = "matrix"
    x_label: str = ""
    y_label: str = ""
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    cells: Sequence[Cell] = ()
    cell_width: float = 0
    cell_height: float = 0
    left: float = 0
    bottom: float = 0


@dataclass(frozen=True)
class Bar:
    """A part of a bar, with words in it where there is room."""

    x: float
    y: float
    width: float
    role: str
    text: str
    words: str


@dataclass(frozen=True)
class Bars(Chart):
    """Bars from left to right: parts of a whole, or spans of time."""

    kind: str = "bars"
    x_label: str = ""
    x_ticks: Sequence[Tick] = ()
    texts: Sequence[Mark] = ()
    bars: Sequence[Bar] = ()
    crosses: Sequence[Mark] = ()
    bar_height: float = 18
    left: float = 0
    right: float = WIDTH - 16
    bottom: float = 0


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    after: Sequence[int],
    words: Callable[[float], str],
    axis_words: Callable[[float], str],
    y_range: tuple[float, float] | None = None,
    requests: Sequence[int] = (),
    limit: Sequence[tuple[float, float]] = (),
) -> LineChart:
    """Lines over the stream, with a band from the lowest to the highest seed.

    Args:
        title: of the chart.
        series: in the order in which they are drawn.
        x_label: of the horizontal axis.
        y_label: of the vertical axis, with the unit.
        after: tasks on the horizontal axis, at the places 0, 1, ….
        words: for a number.
        axis_words: for a number on the axis.
        y_range: of the vertical axis; by default from 0 (or below) to the largest number.
        requests: places of requests.
        limit: (place, number) up to which nothing can be detected.
    """
    height, bottom = 204.0, 204.0 - _BOTTOM
    reach = [end for each in series for _, value in each.points for end in (value.low, value.high)]
    ticks = _ticks(*(y_range or (min(0.0, *reach, 0.0), max(0.0, *reach, 0.0))))
    step = (WIDTH - _RIGHT - _LEFT - 24) / max(len(after) - 1, 1)

    def x(place: float) -> float:
        return round(_LEFT + 12 + step * place, 1)

    named: list[int] = []  # requests with room for the word
    for place in requests:
        if not named or x(place) - x(named[-1]) > 60:
            named.append(place)

    def y(value: float) -> float:
        return round(bottom - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - _TOP), 1)

    lines = []
    for each in series:
        there = [(x(place), value) for place, value in each.points]
        upper = [f"{px},{y(value.high)}" for px, value in there]
        lower = [f"{px},{y(value.low)}" for px, value in reversed(there)]
        lines.append(
            Line(
                each.role,
                each.name,
                " ".join(f"{'L' if n else 'M'}{px},{y(value.mean)}" for n, (px, value) in enumerate(there)),
                f"M{' L'.join(upper + lower)} Z" if any(value.low < value.high for _, value in there) else "",
                [Mark(px, y(value.mean), f"{each.name}: {over_seeds(value, words)}") for px, value in there],
            )
        )
    told = (
        f"{each.name}: {', '.join(over_seeds(value, words) for _, value in each.points)}."
        for each in series
        if each.points
    )
    return LineChart(
        title,
        f"{y_label}, {x_label} {', '.join(map(str, after))}. {' '.join(told)}",
        height,
        [(each.role, each.name) for each in series] + [("limit", "up to the limit of detection")] * bool(limit),
        x_label=x_label,
        y_label=y_label,
        x_ticks=[Tick(x(n), str(task)) for n, task in enumerate(after)],
        y_ticks=[Tick(y(value), axis_words(value)) for value in ticks],
        lines=lines,
        requests=[Tick(x(place), "request" if place in named else "") for place in requests],
        limit=_area([(x(place), y(value)) for place, value in limit], bottom) if limit else "",
        bottom=bottom,
    )


def dot_chart(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, Spread]]],
    names: Mapping[str, str],
    *,
    x_label: str,
    words: Callable[[float], str],
    axis_words: Callable[[float], str],
    x_range: tuple[float, float] | None = None,
    logarithmic: bool = False,
) -> DotChart:
    """Marks on one scale, a row each.

    Args:
        title: of the chart.
        rows: words of a row, and its numbers by role.
        names: role → what it means here.
        x_label: of the axis, with the unit.
        words: for a number.
        axis_words: for a number on the axis.
        x_range: of the axis; by default what the numbers need.
        logarithmic: powers of ten at equal distances.
    """
    reach = [end for _, marks in rows for value in marks.values() for end in (value.low, value.high)]
    if logarithmic:
        first, last = math.floor(math.log10(min(reach))), math.ceil(math.log10(max(reach)))
        ticks = [10.0**power for power in range(first, max(last, first + 1) + 1)]
    else:
        ticks = _ticks(*(x_range or (min(0.0, *reach, 0.0), max(reach))))
    scale = math.log10 if logarithmic else float
    low, high = scale(ticks[0]), scale(ticks[-1])
    left, right = 12.0, WIDTH - 16.0

    def x(value: float) -> float:
        return round(left + (scale(value) - low) / (high - low) * (right - left), 1)

    drawn = []
    for n, (text, marks) in enumerate(rows):
        y = 34.0 + 40 * n
        placed = [
            (role, Mark(x(value.mean), y, f"{names[role]}: {over_seeds(value, words)}"))
            for role, value in sorted(marks.items(), key=lambda item: item[0] == "here")  # ours is drawn last, on top
        ]
        here = marks.get("here")
        drawn.append(Row(text, y, placed, x(here.low) if here else 0, x(here.high) if here else 0))
    told = (
        f"{text}: {', '.join(f'{names[role]} {over_seeds(value, words)}' for role, value in marks.items())}."
        for text, marks in rows
    )
    bottom = 40.0 * len(rows) + 10
    return DotChart(
        title,
        f"{x_label}. {' '.join(told)}",
        bottom + 36,
        [(role, name) for role, name in names.items() if any(role in marks for _, marks in rows)],
        x_label=x_label,
        x_ticks=[Tick(x(value), axis_words(value)) for value in ticks],
        rows=drawn,
        bottom=bottom,
    )


def matrix(
    title: str,
    rows: Sequence[int],
    columns: Sequence[int],
    values: Mapping[tuple[int, int], float],
    *,
    x_label: str,
    y_label: str,
    words: Callable[[float], str],
    below: Mapping[tuple[int, int], Sequence[str]] | None = None,
    framed: Sequence[tuple[int, int]] = (),
    details: Mapping[tuple[int, int], str] | None = None,
    legend: Sequence[tuple[str, str]] = (),
) -> Matrix:
    """A matrix of shares, dark where they are large.

    Args:
        title: of the chart.
        rows: names, from above.
        columns: names, from the left.
        values: (row, column) → number in [0, 1]; empty cells have none.
        x_label: of the columns.
        y_label: of the rows.
        words: for a number.
        below: (row, column) → lines under a cell's number.
        framed: cells in a frame.
        details: (row, column) → words for those who point at a cell, in place of the number's.
        legend: of the chart.
    """
    below, details = below or {}, details or {}
    left, top = 40.0, 22.0
    cell_width = max((WIDTH - left - 6) / max(len(columns), 1), 52.0)
    cell_height = 34.0 if not below else 30.0 + 12 * max(len(lines) for lines in below.values())
    cells = []
    for (row, column), value in values.items():
        fill, ink = shade(value)
        place = (row, column)
        cells.append(
            Cell(
                round(left + cell_width * columns.index(column), 1),
                top + cell_height * rows.index(row),
                words(value),
                below.get(place, ()),
                fill,
                ink,
                place in framed,
                details.get(place, f"{y_label} {row}, {x_label} {column}: {words(value)}"),
            )
        )
    told = (
        f"{y_label} {row}: "
        + ", ".join(
            f"{column}: {' '.join([words(values[row, column]), *below.get((row, column), ())])}"
            for column in columns
            if (row, column) in values
        )
        + "."
        for row in rows
    )
    bottom = top + cell_height * len(rows)
    return Matrix(
        title,
        f"By {x_label}. {' '.join(told)}",
        bottom + 22,
        legend,
        left + cell_width * len(columns) + 6,
        x_label=x_label,
        y_label=y_label,
        x_ticks=[Tick(round(left + cell_width * (n + 0.5), 1), str(column)) for n, column in enumerate(columns)],
        y_ticks=[Tick(top + cell_height * (n + 0.5), str(row)) for n, row in enumerate(rows)],
        cells=cells,
        cell_width=round(cell_width - 2, 1),
        cell_height=cell_height - 2,
        left=left,
        bottom=bottom,
    )


def owner_bars(
    title: str,
    layers: Mapping[str, Mapping[str, Mapping[str, float]]],
    words: Callable[[float], str],
    roles: Mapping[str, str],
) -> Bars:
    """Shares of every layer by owner, a bar for each moment.

    Args:
        title: of the chart.
        layers: layer → moment (``before``, ``after``) → owner → share.
        words: for a share.
        roles: owner → role that colours its part.
    """
    texts, bars, y = [], [], 6.0
    left, right = 52.0, WIDTH - 18.0
    told = []
    for layer, moments in layers.items():
        texts.append(Mark(0, y + 12, layer))
        y += 18
        for moment, owners in moments.items():
            texts.append(Mark(0, y + 13, moment))
            x = left
            for owner, share_ in owners.items():
                width = share_ * (right - left)
                fitting = [name for name in (owner, owner.removeprefix("task ")) if width > 6.5 * len(name) + 8]
                text = fitting[0] if fitting else ""
                tip = f"{layer}, {moment}, {owner}: {words(share_)}"
                bars.append(Bar(round(x, 1), y, round(width, 1), roles[owner], text, tip))
                x += width
            told.append(f"{layer} {moment}: {', '.join(f'{o} {words(s)}' for o, s in owners.items())}.")
            y += 22
        y += 6
    return Bars(
        title,
        " ".join(told),
        y + 34,
        [(role, owner) for owner, role in roles.items()],
        x_label="share of the layer",
        x_ticks=[Tick(round(left + part * (right - left), 1), f"{part:.0%}") for part in (0, 0.5, 1)],
        texts=texts,
        bars=bars,
        left=left,
        right=right,
        bottom=y,
    )


def timeline(title: str, after: Sequence[int], gone: Mapping[int, int]) -> Bars:
    """Bars from the training of a task to its unlearning.

    Args:
        title: of the chart.
        after: tasks in the order of their training.
        gone: task → the task after which it was unlearned.
    """
    left, right = 52.0, WIDTH - 8.0
    step = (right - left) / max(len(after), 1)
    texts, bars, crosses, told = [], [], [], []
    for n, task in enumerate(after):
        y = 6.0 + 26 * n
        texts.append(Mark(0, y + 13, f"task {task}"))
        start = left + step * n
        end = left + step * (after.index(gone[task]) + 1) if task in gone else right
        words = f"task {task}: trained, " + (f"unlearned after task {gone[task]}" if task in gone else "remains")
        text = "unlearned" if task in gone else "remains"
        room = end - start > 7 * len(text) + 20
        bars.append(
            Bar(round(start, 1), y, round(end - start, 1), "gone" if task in gone else "here", text * room, words)
        )
        if task in gone:
            crosses.append(Mark(round(end - 8, 1), y + 9, words))
        told.append(words)
    bottom = 6.0 + 26 * len(after)
    return Bars(
        title,
        f"{'; '.join(told)}.",
        bottom + 36,
        [("here", "in the model until the end"), ("gone", "in the model, until unlearned at ✕")],
        x_label="after the training of task",
        x_ticks=[Tick(round(left + step * (n + 1) - 8, 1), str(task)) for n, task in enumerate(after)],
        texts=texts,
        bars=bars,
        crosses=crosses,
        left=left,
        right=right,
        bottom=bottom,
    )


def _area(line: Sequence[tuple[float, float]], bottom: float) -> str:
    """Path around what lies below a line; a single place gets some width."""
    if len(line) == 1:
        line = [(line[0][0] - 8, line[0][1]), (line[0][0] + 8, line[0][1])]
    return f"M{line[0][0]},{bottom} L{' L'.join(f'{x},{y}' for x, y in line)} L{line[-1][0]},{bottom} Z"


def shade(value: float) -> tuple[str, str]:
    """A blue for a share in [0, 1], and black or white, whichever is easier to read on it."""
    value = min(max(value, 0.0), 1.0)
    low, high = (236, 243, 250), (8, 64, 129)
    mixed = [round(a + (b - a) * value) for a, b in zip(low, high, strict=True)]
    light = _luminance(mixed)
    ink = "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#ffffff"
    return f"#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}", ink


def _luminance(rgb: Sequence[int]) -> float:
    """Relative luminance, WCAG 2."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers at equal distances that enclose a range."""
    if high <= low:
        high = low + 1.0
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * n, 12) for n in range(first, max(last, first + 1) + 1)]
