"""Masks as a figure: which units each task uses and which are shared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

MAX_WIDTH = 1024
"""Pixels; wider layers show the mean of neighbouring units in one column."""
MAX_LAYERS = 24
"""Layers that a figure of masks shows; of deeper networks those evenly spread over the depth."""


def _rows(masks: Mapping[int, Tensor]) -> Tensor:
    first = next(iter(masks.values()))
    rows = []
    for task, mask in masks.items():
        if mask.ndim != 1 or mask.numel() == 0 or mask.shape != first.shape:
            raise ValueError(
                f"mask of task {task} has shape {tuple(mask.shape)}, the first one {tuple(first.shape)}: "
                "pass masks of one layer, each of the same shape (units,)"
            )
        row = mask.detach().to("cpu", torch.float32)
        if not bool(((row >= 0) & (row <= 1)).all()):
            raise ValueError(
                f"mask of task {task} has values outside [0, 1] (from {row.min()} to {row.max()}): "
                "pass the mask itself, not its embedding"
            )
        rows.append(row)
    return torch.stack(rows)


def _narrowed(rows: Tensor) -> Tensor:
    """Rows of at most `MAX_WIDTH` columns; of wider ones the mean of neighbouring columns."""
    if rows.shape[1] <= MAX_WIDTH:
        return rows
    return torch.nn.functional.adaptive_avg_pool1d(rows[None], MAX_WIDTH)[0]


@dataclass(frozen=True)
class LayerMasks:
    """One layer's masks as a figure shows them: small, whatever the width of the layer."""

    layer: str
    rows: np.ndarray
    units: int
    used: tuple[float, ...]
    shared: float


def layer_masks(masks: Mapping[int, Mapping[str, Tensor | Sequence[bool]]]) -> list[LayerMasks]:
    """Masks layer by layer, made ready to be drawn; of more than 24 layers those evenly spread over the depth."""
    made = []
    for layer in _shown(list(next(iter(masks.values()), {}))):
        rows = _rows({task: torch.as_tensor(of_task[layer]) for task, of_task in masks.items()})
        pixels = (_narrowed(rows) * 255).round().to(torch.uint8).numpy()
        shared = float((rows > 0).sum(0).gt(1).float().mean())
        made.append(LayerMasks(layer, pixels, rows.shape[1], tuple(rows.mean(1).tolist()), shared))
    return made


def _shown(layers: Sequence[str]) -> Sequence[str]:
    if len(layers) <= MAX_LAYERS:
        return layers
    return [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS).round().astype(int)]


def masks_figure(masks: Mapping[int, Mapping[str, Tensor | Sequence[bool]]]) -> Figure:
    """Units (or weights) of every layer, along x, that each remaining task, a row, uses; a panel per layer.

    Args:
        masks: task label -> layer -> mask of shape (units,). Layers wider than 1,024 units show the mean of neighbours;
            of more than 24 layers those are shown that are evenly spread over the depth.
    """
    return layers_figure(list(masks), layer_masks(masks))


def layers_figure(tasks: Sequence[int], layers: Sequence[LayerMasks]) -> Figure:
    """The figure of :func:`masks_figure`, from what :func:`layer_masks` made ready."""
    height = 0.8 + max(len(layers), 1) * (0.62 + 0.16 * max(len(tasks), 1))
    figure = Figure(figsize=(8, height), layout="constrained")
    if not layers:
        figure.text(0.5, 0.5, "no task remains: no mask", ha="center", va="center")
        return figure
    axes = np.atleast_1d(figure.subplots(len(layers), 1))
    for ax, masks in zip(axes, layers, strict=True):
        span = (-0.5, masks.units - 0.5, len(tasks) - 0.5, -0.5)
        ax.imshow(masks.rows, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=255, extent=span)
        title = f"{masks.layer}: {masks.units} entries, {masks.shared:.0%} shared by several tasks"
        ax.set_title(title, fontsize=8, loc="left")
        names = [f"task {task}: {used:.0%}" for task, used in zip(tasks, masks.used, strict=True)]
        ax.set_yticks(range(len(tasks)), names, fontsize=7)
        ax.tick_params(axis="x", labelsize=7)
    axes[-1].set_xlabel("unit (or weight) of the layer", fontsize=8)
    colours = {"used": matplotlib.colormaps["Blues"](1.0), "not used": "white"}
    handles = [Patch(facecolor=colour, edgecolor="grey", label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=7, frameon=False)
    return figure
