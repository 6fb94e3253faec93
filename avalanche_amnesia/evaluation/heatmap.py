"""Masks of one layer as a picture: which units each task uses and which are shared."""

from collections.abc import Mapping

import matplotlib
import torch
from avalanche.evaluation.metric_results import TensorImage
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

MAX_WIDTH = 1024
"""Pixels; wider layers show the mean of neighbouring units in one column."""
CELL = 16
"""Largest side of a cell in pixels."""
MIN_CELL_HEIGHT = 4
"""Smallest height of a row in pixels, however many tasks there are."""


def mask_heatmap(masks: Mapping[int, Tensor]) -> Image.Image:
    """One layer's masks as RGB: a row per task in the mapping's order, a column per unit; 1 is bright.

    Args:
        masks: task label -> mask of shape (units,), binary or soft, every value in [0, 1].

    Raises:
        ValueError: no mask, masks of different or wrong shapes, or values outside [0, 1].
    """
    if not masks:
        raise ValueError("masks is empty: pass the mask of at least one task as {task label: tensor of shape (units,)}")
    rows = _rows(masks)
    tasks, units = rows.shape
    if units > MAX_WIDTH:
        rows = torch.nn.functional.adaptive_avg_pool1d(rows[None], MAX_WIDTH)[0]
        units = MAX_WIDTH
    width = min(CELL, MAX_WIDTH // units)
    height = max(MIN_CELL_HEIGHT, min(CELL, MAX_WIDTH // tasks))
    pixels = matplotlib.colormaps["viridis"](rows.numpy(), bytes=True)[..., :3]
    picture = Image.fromarray(pixels.copy())
    return picture.resize((units * width, tasks * height), Image.Resampling.NEAREST)


def as_tensor_image(picture: Image.Image) -> TensorImage:
    """A picture as a metric's value: text loggers skip it, dashboards show it."""
    return TensorImage(pil_to_tensor(picture).to(torch.float32) / 255)


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
