"""Figures of runs with unlearning, as matplotlib figures without pyplot's global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

Row = Mapping[str, object]


def accuracy_figure(
    matrices: Mapping[str, Sequence[Mapping[int, float]]], unlearned: Sequence[Sequence[int]]
) -> Figure:
    """Accuracy after every task, one panel per strategy; cells of unlearned tasks are framed.

    Args:
        matrices: strategy → per trained task, test task → accuracy (through the kept head, once it is unlearned).
        unlearned: per trained task, the tasks unlearned by then.
    """
    n = len(unlearned)
    figure = Figure(figsize=(3.1 * len(matrices) + 0.9, 3.7), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(matrices), sharey=True))
    picture = None
    for ax, (name, rows) in zip(axes, matrices.items(), strict=True):
        values = np.full((n, n), np.nan)
        for t, row in enumerate(rows):
            for task, accuracy in row.items():
                values[t, task] = accuracy
        picture = ax.imshow(values, vmin=0, vmax=1, cmap="viridis")
        for t, row in enumerate(rows):
            for task, accuracy in row.items():
                colour = "white" if accuracy < 0.6 else "black"
                ax.text(task, t, f"{accuracy:.2f}", ha="center", va="center", color=colour, fontsize=8)
        for t, tasks in enumerate(unlearned):
            for task in tasks:
                frame = Rectangle((task - 0.46, t - 0.46), 0.92, 0.92, fill=False, edgecolor="crimson", linewidth=1.8)
                ax.add_patch(frame)
        ax.set(title=name, xlabel="tested on task", xticks=range(n), yticks=range(n))
    axes[0].set_ylabel("after training task")
    if picture is not None:
        figure.colorbar(picture, ax=list(axes), shrink=0.85, label="test accuracy")
    figure.supxlabel("red frame: unlearned, read through the head and mask it had; near chance is good", fontsize=8)
    return figure


def capacity_figure(
    capacity: Sequence[float], trajectory_bytes: Sequence[int], unlearned_now: Sequence[Sequence[int]]
) -> Figure:
    """Free capacity and bytes of trajectory after every task, with the unlearnings marked."""
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    ax = figure.subplots()
    tasks = range(len(capacity))
    ax.plot(tasks, capacity, marker="o", color="tab:blue")
    ax.set(
        xlabel="after task (and its requests)", ylabel="network capacity (1: all free)", ylim=(0, 1.02), xticks=tasks
    )
    ax.yaxis.label.set_color("tab:blue")
    other = ax.twinx()
    other.plot(tasks, [b / 1024 for b in trajectory_bytes], marker="s", linestyle="--", color="tab:orange")
    other.set_ylabel("trajectory (KiB)")
    other.yaxis.label.set_color("tab:orange")
    other.set_ylim(bottom=0)
    for t, gone in enumerate(unlearned_now):
        if gone:
            _mark(ax, t, "unlearned " + ", ".join(map(str, gone)))
    return figure


def _mark(ax: Axes, x: float, text: str) -> None:
    ax.axvline(x, color="crimson", linewidth=1, linestyle=":")
    label = ax.text(x, 0.03, text, rotation=90, va="bottom", ha="right", fontsize=8, color="crimson")
    label.set_transform(ax.get_xaxis_transform())


def masks_figure(masks: Mapping[int, Mapping[str, Sequence[bool]]]) -> Figure:
    """Units of every layer (columns) that each remaining task (row) uses, one panel per layer."""
    layers = list(next(iter(masks.values()))) if masks else []
    figure = Figure(figsize=(8, 0.9 + max(len(layers), 1) * (0.55 + 0.16 * len(masks))), layout="constrained")
    if not layers:
        figure.text(0.5, 0.5, "no task remains", ha="center")
        return figure
    axes = np.atleast_1d(figure.subplots(len(layers), 1))
    for ax, layer in zip(axes, layers, strict=True):
        rows = np.array([np.asarray(of_task[layer], dtype=float) for of_task in masks.values()])
        ax.imshow(rows, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
        share = ", ".join(f"task {task}: {row.mean():.0%}" for task, row in zip(masks, rows, strict=True))
        ax.set_title(f"{layer}: units used by {share}", fontsize=8, loc="left")
        ax.set_yticks(range(len(masks)), [str(task) for task in masks], fontsize=8)
        ax.tick_params(axis="x", labelsize=7)
    figure.supylabel("task", fontsize=8)
    return figure
