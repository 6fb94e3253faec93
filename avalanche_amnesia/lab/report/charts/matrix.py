"""Matrices of shares, dark where they are large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from avalanche_amnesia.lab.report.charts.parts import WIDTH, Chart, Tick


@dataclass(frozen=True)
class Shown:
    """Content of a cell."""

    value: float
    words: str = ""
    below: Sequence[str] = ()
    framed: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell as drawn: colour by value, text in the colour that is easier to read on it."""

    x: float
    y: float
    text: str
    below: Sequence[str]
    fill: str
    ink: str
    framed: bool
    words: str


@dataclass(frozen=True, kw_only=True)
class Matrix(Chart):
    """Cells of rows and columns."""

    kind: ClassVar[str] = "matrix"
    left: ClassVar[float] = 40.0
    top: ClassVar[float] = 22.0
    y_label: str
    y_ticks: Sequence[Tick]
    cells: Sequence[Cell]
    cell_width: float
    cell_height: float


def matrix(
    title: str,
    rows: Sequence[int],
    columns: Sequence[int],
    shown: Mapping[tuple[int, int], Shown],
    *,
    x_label: str,
    y_label: str,
    words: Callable[[float], str],
    legend: Sequence[tuple[str, str]] = (),
) -> Matrix:
    """A matrix of shares, dark where they are large."""
    left, top = Matrix.left, Matrix.top
    width = max((WIDTH - left - 6) / max(len(columns), 1), 52.0)
    deepest = max((len(content.below) for content in shown.values()), default=0)
    height = 30.0 + 12 * deepest if deepest else 34.0
    cells = []
    for (row, column), content in shown.items():
        number = words(content.value)
        fill, ink = shade(content.value)
        cells.append(
            Cell(
                x=round(left + width * columns.index(column), 1),
                y=top + height * rows.index(row),
                text=number,
                below=content.below,
                fill=fill,
                ink=ink,
                framed=content.framed,
                words=content.words or f"{y_label} {row}, {x_label} {column}: {number}",
            )
        )
    told = []
    for row in rows:
        of_row = {column: shown[row, column] for column in columns if (row, column) in shown}
        numbers = (f"{column}: {' '.join([words(it.value), *it.below])}" for column, it in of_row.items())
        told.append(f"{y_label} {row}: {', '.join(numbers)}.")
    bottom = top + height * len(rows)
    return Matrix(
        title=title,
        description=f"By {x_label}. {' '.join(told)}",
        legend=legend,
        width=left + width * len(columns) + 6,
        height=bottom + 22,
        bottom=bottom,
        x_label=x_label,
        x_ticks=[Tick(round(left + width * (n + 0.5), 1), str(column)) for n, column in enumerate(columns)],
        y_label=y_label,
        y_ticks=[Tick(top + height * (n + 0.5), str(row)) for n, row in enumerate(rows)],
        cells=cells,
        cell_width=round(width - 2, 1),
        cell_height=height - 2,
    )


def shade(value: float) -> tuple[str, str]:
    """A blue for a share in [0, 1], and black or white, whichever is easier to read on it."""
    value = min(max(value, 0.0), 1.0)
    low, high = (236, 243, 250), (8, 64, 129)
    mixed = [round(a + (b - a) * value) for a, b in zip(low, high, strict=True)]
    light = luminance(mixed)
    ink = "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#ffffff"
    return f"#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}", ink


def luminance(rgb: Sequence[int]) -> float:
    """Relative luminance, WCAG 2."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
