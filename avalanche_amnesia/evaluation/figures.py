"""Matplotlib figures in one style, without pyplot's global state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

WIDTH = 360
"""Width of a figure in points: about the pixels of a phone, so that text has its full size on a phone."""
COLOURS = {
    "page": "#fefefe",  # not quite white: numbers on dark cells stay white where the page is dark
    "ink": "#1b1f24",
    "quiet": "#4f5963",
    "rule": "#c8d0d8",
    "bad": "#a32020",
    "here": "#0b5cad",
}
"""Name → colour; the report has a second colour of each name for dark pages."""
REQUEST: dict[str, Any] = {"color": COLOURS["bad"], "linewidth": 1, "linestyle": (0, (2, 3)), "zorder": 1}
SHARES = LinearSegmentedColormap.from_list("shares", ["#ecf3fa", "#084081"])
WHITE_FROM = 0.685  # white and black text are equally easy to read on this share's colour
SMALL = 9.5
MAX_CELLS_WITH_NUMBERS = 400

house_style = matplotlib.rc_context(
    {
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "axes.labelcolor": COLOURS["quiet"],
        "axes.labelsize": 11,
        **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
        "figure.constrained_layout.h_pad": 0.03,
        "figure.constrained_layout.use": True,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 11,
        "grid.color": COLOURS["rule"],
        "legend.fontsize": 11,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "text.color": COLOURS["ink"],
        "text.parse_math": False,  # names are arbitrary text
        "xtick.color": COLOURS["quiet"],
        "xtick.major.size": 0,
        "ytick.color": COLOURS["quiet"],
        "ytick.major.size": 0,
    }
)
"""Decorator of every function that draws or writes a figure: ticks are made only when the figure is written."""


@dataclass(frozen=True)
class Table:
    """Table of plain values (text, numbers, None), for loggers that can write tables."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure of ``width`` × ``height`` points."""
    return Figure(figsize=(width / 72, height / 72))


def label_ticks(axis: Any, names: Sequence[Any], *, first: float = 0.0, most: int = 15, **style: Any) -> None:
    """Label the ticks of a plot's axis with ``names``, at ``first``, ``first + 1`` …; at most ``most`` are shown."""
    step = math.ceil(len(names) / most)
    axis.set_ticks(np.arange(0, len(names), step) + first, [str(name) for name in names[::step]], **style)


@house_style
def matrix_figure(
    title: str,
    shares: Sequence[Sequence[float | None]],
    *,
    rows: Sequence[Any],
    columns: Sequence[Any],
    row_label: str,
    column_label: str,
    note: str = "",
) -> Figure:
    """Draw a matrix of shares in [0, 1]: larger shares are darker; up to 400 cells also show their percentage."""
    names = 7 * max((len(str(row)) for row in rows), default=0)
    figure = new_figure(min(32 * len(rows), 720) + 70, max(WIDTH, min(44 * len(columns), 720) + names + 40))
    if not rows or not columns:
        figure.text(0.5, 0.5, "nothing to show", ha="center", va="center")
        return figure
    ax = figure.subplots()
    values = np.ma.masked_invalid(np.array(shares, dtype=float))
    numbered = values.size <= MAX_CELLS_WITH_NUMBERS
    edges: dict[str, Any] = {"edgecolors": COLOURS["page"], "linewidth": 2} if numbered else {"rasterized": True}
    drawn = ax.pcolormesh(values, cmap=SHARES, vmin=0, vmax=1, **edges)
    for row, of_row in enumerate(shares if numbered else ()):
        for column, share in enumerate(of_row):
            if share is not None:
                number = ax.annotate(f"{100 * share:.0f}", (column + 0.5, row + 0.5), ha="center", va="center")
                number.set(color="#ffffff" if share > WHITE_FROM else "#000000", fontsize=11, fontweight="bold")
                number.set_in_layout(False)  # text inside a cell needs no layout, which takes time
    label_ticks(ax.xaxis, columns, first=0.5)
    label_ticks(ax.yaxis, rows, first=0.5, most=25)
    ax.set(title=title, xlabel=column_label, ylabel=row_label, ylim=(len(rows), 0))
    if not numbered:
        figure.colorbar(drawn, ax=ax, format="{x:.0%}")
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=SMALL)
    return figure
