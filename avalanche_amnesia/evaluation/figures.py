"""Matplotlib figures in one style, without pyplot's global state."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

WIDTH = 360
"""Width of a figure in points: about the pixels of a phone, so that text has its full size on a phone."""
COLOURS = {
    "page": "#fefefe",  # not quite white: numbers on dark cells stay white where the page is dark
    "ink": "#1b1f24",
    "quiet": "#4f5963",
    "rule": "#c8d0d8",
    "bad": "#a32020",
    "here": "#0b5cad",
    "retrained": "#a84300",
    "never": "#75329b",
    "order": "#006b54",
    "seed": "#7d5a00",
}
"""Name → colour; the report has a second colour of each name for dark pages."""
ROLES: dict[str, dict[str, Any]] = {
    "here": {"color": COLOURS["here"], "marker": "o", "linestyle": "-"},
    "retrained": {"color": COLOURS["retrained"], "marker": "s", "linestyle": (0, (3.5, 1.5))},
    "never": {"color": COLOURS["never"], "marker": "^", "linestyle": "-."},
    "chance": {"color": COLOURS["quiet"], "marker": "|", "markersize": 15, "markeredgewidth": 3},
    "order": {"color": COLOURS["order"], "marker": "D", "linestyle": ":"},
    "seed": {"color": COLOURS["seed"], "marker": "x", "markeredgewidth": 2, "linestyle": "--"},
}
"""Role of a model in a figure → style of its lines and marks, in every figure."""
REQUEST: dict[str, Any] = {"color": COLOURS["bad"], "linewidth": 1, "linestyle": (0, (2, 3)), "zorder": 1}
SHARES = LinearSegmentedColormap.from_list("shares", ["#ecf3fa", "#084081"])
_FRAME: Sequence[dict[str, Any]] = (
    {"edgecolor": "#ffffff", "linewidth": 4},
    {"edgecolor": "#c01c28", "linewidth": 2, "linestyle": (0, (2.5, 1))},
)
WHITE_FROM = 0.685  # white and black text are equally easy to read on this share's colour
SMALL = 9.5
_MAX_CELLS_WITH_NUMBERS = 400

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


@house_style
def as_png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file; equal figures give equal bytes."""
    picture = io.BytesIO()
    dots_per_inch = min(130, 2600 / figure.get_figheight())  # a figure of many panels stays a file for a page
    figure.savefig(picture, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return picture.getvalue()


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure of ``width`` × ``height`` points."""
    return Figure(figsize=(width / 72, height / 72))


def name_ticks(axis: Any, names: Sequence[Any], *, first: float = 0.0, most: int = 15, **style: Any) -> None:
    """Set tick names of an axis at ``first``, ``first + 1`` …; of more than ``most`` names, only every k-th."""
    step = math.ceil(len(names) / most)
    axis.set_ticks(np.arange(0, len(names), step) + first, [str(name) for name in names[::step]], **style)


class Cell(NamedTuple):
    """Cell of a matrix figure: a share in [0, 1], small words ``below`` it, and ``framed`` (True: with a frame)."""

    value: float
    below: Sequence[str] = ()
    framed: bool = False


@house_style
def matrix_figure(
    panels: Mapping[str, Sequence[Sequence[Cell | None]]],
    *,
    rows: Sequence[Any],
    columns: Sequence[Any],
    row_label: str,
    column_label: str,
    note: str = "",
) -> Figure:
    """Draw one matrix of shares per title: each cell shows its percentage and is darker for a larger share."""
    lines = max((len(cell.below) for cells in panels.values() for row in cells for cell in row if cell), default=0)
    names = 7 * max((len(str(row)) for row in rows), default=0)
    width = max(WIDTH, min((60 if lines else 44) * len(columns), 720) + names + 40)
    figure = new_figure(min((32 + 12 * lines) * len(rows), 720) + 70, len(panels) * width)
    if not rows or not columns:
        figure.text(0.5, 0.5, "nothing to show", ha="center", va="center")
        return figure
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for ax, (title, cells) in zip(all_axes, panels.items(), strict=True):
        drawn = _draw_cells(ax, cells)
        ax.set(title=title, xlabel=column_label)
        name_ticks(ax.xaxis, columns, first=0.5)
        name_ticks(ax.yaxis, rows, first=0.5, most=25)
    all_axes[0].set(ylabel=row_label, ylim=(len(rows), 0))
    if len(rows) * len(columns) > _MAX_CELLS_WITH_NUMBERS:
        figure.colorbar(drawn, ax=list(all_axes), format="{x:.0%}")
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=SMALL)
    return figure


def _draw_cells(ax: Axes, cells: Sequence[Sequence[Cell | None]]) -> Any:
    values = np.ma.masked_invalid([[math.nan if cell is None else cell.value for cell in row] for row in cells])
    numbered = values.size <= _MAX_CELLS_WITH_NUMBERS
    edges: dict[str, Any] = {"edgecolors": COLOURS["page"], "linewidth": 2} if numbered else {"rasterized": True}
    drawn = ax.pcolormesh(values, cmap=SHARES, vmin=0, vmax=1, **edges)
    for row, of_row in enumerate(cells if numbered else ()):
        for column, cell in enumerate(of_row):
            if cell is None:
                continue
            for style in _FRAME if cell.framed else ():
                ax.add_patch(Rectangle((column + 0.06, row + 0.07), 0.88, 0.86, fill=False, **style))
            for n, words in enumerate([f"{100 * cell.value:.0f}", *cell.below]):
                ax.annotate(
                    words,
                    (column + 0.5, row + 0.5),
                    xytext=(0, 6 * len(cell.below) - 11 * n),
                    textcoords="offset points",
                    ha="center",
                    va="center",
                    color="#ffffff" if cell.value > WHITE_FROM else "#000000",
                    fontsize=SMALL if n else 11,
                    fontweight="normal" if n else "bold",
                ).set_in_layout(False)  # text inside a cell needs no layout, which takes time
    return drawn
