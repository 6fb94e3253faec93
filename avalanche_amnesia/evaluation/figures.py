"""Figures of metrics, as matplotlib figures without pyplot's global state, and as values that every logger can take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from avalanche.evaluation.metric_results import TensorImage
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

DPI = 100
_MAX_CELLS_WITH_NUMBERS = 400


@dataclass(frozen=True)
class Table:
    """Columns and rows of plain values (text, numbers, None), for loggers that have a place for tables."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class Picture(TensorImage):
    """A figure as a metric's value: drawn when a logger asks for pixels, skipped by loggers of text."""

    def __init__(self, draw: Callable[..., Figure], *arguments: Any, table: Table | None = None) -> None:
        self._draw, self._arguments, self.table = draw, arguments, table

    @cached_property
    def image(self) -> Tensor:
        """Pixels, uint8 of shape ``(3, height, width)``."""
        figure = self._draw(*self._arguments)
        canvas = FigureCanvasAgg(figure)
        figure.set_dpi(DPI)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, 0)))

    def __repr__(self) -> str:
        return f"Picture({getattr(self._draw, '__name__', self._draw)})"


def matrix_figure(
    values: Sequence[Sequence[float]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    row_label: str,
    column_label: str,
    value_label: str,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Figure:
    """A matrix with its numbers written into its cells; NaN cells stay empty."""
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise ValueError(
            f"{len(rows)} names of rows and {len(columns)} of columns for a matrix of {len(values)} rows of "
            f"{sorted({len(row) for row in values})} values: give a name for each"
        )
    if not rows or not columns:
        figure = Figure(figsize=(4, 1.2))
        figure.text(0.5, 0.5, f"{title}: nothing to show", ha="center", va="center", fontsize=9)
        return figure
    cell = 0.5 if max(len(rows), len(columns)) <= 12 else 0.28
    size = max(3.4, cell * len(columns) + 2.2), max(2.2, cell * len(rows) + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    ax = figure.subplots()
    matrix = np.array(values, dtype=float).reshape(len(rows), len(columns))
    picture = ax.imshow(matrix, vmin=bounds[0], vmax=bounds[1], cmap="viridis", aspect="auto")
    if matrix.size <= _MAX_CELLS_WITH_NUMBERS:
        middle = bounds[0] + 0.6 * (bounds[1] - bounds[0])
        for (row, column), value in np.ndenumerate(matrix):
            if not math.isnan(value):
                colour = "white" if value < middle else "black"
                number = ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)
                number.set_in_layout(False)  # inside of its cell it takes no room, and measuring takes time
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(column_label, fontsize=8)
    ax.set_ylabel(row_label, fontsize=8)
    ax.set_xticks(range(len(columns)), columns, fontsize=7)
    ax.set_yticks(range(len(rows)), rows, fontsize=7)
    colours = figure.colorbar(picture, ax=ax, shrink=0.9)
    colours.set_label(value_label, fontsize=8)
    colours.ax.tick_params(labelsize=7)
    return figure


def capacity_figure(
    capacity: Sequence[float],
    trajectory_bytes: Sequence[int],
    unlearned_now: Sequence[Sequence[int]],
    names: Sequence[str] | None = None,
) -> Figure:
    """Free capacity and bytes of trajectory after every task or event, with the unlearnings marked."""
    figure = Figure(figsize=(max(5.6, 0.45 * len(capacity) + 2), 3.2), layout="constrained")
    ax = figure.subplots()
    points = range(len(capacity))
    ax.plot(points, capacity, marker="o", color="tab:blue")
    ax.set(
        xlabel="after task (and its requests)" if names is None else "after",
        ylabel="network capacity (1: all free)",
        ylim=(0, 1.02),
    )
    ax.set_xticks(points, [str(point) for point in points] if names is None else names)
    if names is not None:
        ax.tick_params(axis="x", labelsize=7, labelrotation=30 if len(names) > 8 else 0)
    ax.yaxis.label.set_color("tab:blue")
    other = ax.twinx()
    other.plot(points, [b / 1024 for b in trajectory_bytes], marker="s", linestyle="--", color="tab:orange")
    other.set_ylabel("trajectory (KiB)")
    other.yaxis.label.set_color("tab:orange")
    other.set_ylim(bottom=0)
    for point, gone in enumerate(unlearned_now):
        if gone:
            _mark(ax, point, "unlearned " + ", ".join(map(str, gone)))
    return figure


def _mark(ax: Axes, x: float, text: str) -> None:
    ax.axvline(x, color="crimson", linewidth=1, linestyle=":")
    label = ax.text(x, 0.03, text, rotation=90, va="bottom", ha="right", fontsize=8, color="crimson")
    label.set_transform(ax.get_xaxis_transform())


def overlap_figure(overlap: Mapping[int, Mapping[int, float]], of: str = "all layers") -> Figure:
    """Overlap of every two tasks' masks."""
    names = [str(task) for task in overlap]
    return matrix_figure(
        [[overlap[task][other] for other in overlap] for task in overlap],
        rows=names,
        columns=names,
        title=f"overlap of masks, {of}",
        row_label="task",
        column_label="task",
        value_label="intersection over union",
    )
