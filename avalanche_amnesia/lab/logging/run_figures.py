"""Figures of whole runs, as matplotlib figures without pyplot's global state; those of metrics are beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from avalanche_amnesia.evaluation.figures import capacity_figure as capacity_figure
from avalanche_amnesia.evaluation.heatmap import masks_figure as masks_figure


def accuracy_figure(
    matrices: Mapping[str, Sequence[Mapping[int, float]]], unlearned: Sequence[Sequence[int]]
) -> Figure:
    """Accuracy after every task, one panel per strategy; cells of unlearned tasks are framed."""
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
