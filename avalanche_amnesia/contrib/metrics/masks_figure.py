"""Masks as a figure: which units each task uses and which are shared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from avalanche_amnesia.evaluation.figures import SHARES, SMALL, house_style, new_figure

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


@house_style
def layers_figure(tasks: Sequence[int], layers: Sequence[LayerMasks]) -> Figure:
    """The figure of :func:`masks_figure`, from what :func:`layer_masks` made ready."""
    figure = new_figure(60 + max(len(layers), 1) * (48 + 14 * max(len(tasks), 1)), width=580)
    if not layers:
        figure.text(0.5, 0.5, "no task remains: no mask", ha="center", va="center")
        return figure
    axes = figure.subplots(len(layers), 1, squeeze=False)[:, 0]
    for ax, masks in zip(axes, layers, strict=True):
        span = (-0.5, masks.units - 0.5, len(tasks) - 0.5, -0.5)
        ax.imshow(masks.rows, aspect="auto", interpolation="nearest", cmap=SHARES, vmin=0, vmax=255, extent=span)
        title = f"{masks.layer}: {masks.units} entries, {masks.shared:.0%} shared by several tasks"
        ax.set_title(title, fontsize=SMALL, loc="left")
        names = [f"task {task}: {used:.0%}" for task, used in zip(tasks, masks.used, strict=True)]
        ax.set_yticks(range(len(tasks)), names)
        ax.tick_params(labelsize=SMALL)
    axes[-1].set_xlabel("unit (or weight) of the layer; dark: used")
    return figure
