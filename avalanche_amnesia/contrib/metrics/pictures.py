"""Pictures of a run: the capacity after every event, and which units each task uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from avalanche.evaluation.metric_results import MetricValue
from matplotlib.figure import Figure
from torch import Tensor

from avalanche_amnesia.evaluation.bases import CallbackMetric
from avalanche_amnesia.evaluation.capacity import network_capacity, trajectory_bytes
from avalanche_amnesia.evaluation.figures import (
    REQUEST,
    ROLES,
    SHARES,
    SMALL,
    WIDTH,
    house_style,
    name_ticks,
    new_figure,
)
from avalanche_amnesia.evaluation.picture import Picture
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of

MAX_WIDTH = 1024
"""Pixels; wider layers show the mean of neighbouring units in one column."""
MAX_LAYERS = 24
"""Layers that a figure of masks shows; of deeper networks those evenly spread over the depth."""


@house_style
def capacity_figure(
    names: Sequence[str], capacity: Sequence[float], trajectory_bytes: Sequence[float], requested: Sequence[bool]
) -> Figure:
    """Free capacity and bytes of trajectory after every event; requests are marked."""
    room = 3.5 * max(map(len, names), default=0)  # for slanted names
    figure = new_figure(270 + room, min(max(WIDTH, 32 * len(names) + 80), 1440))
    above, below = axes = figure.subplots(2, 1, sharex=True)
    above.plot(capacity, **ROLES["here"])
    above.set(ylabel="free capacity", ylim=(0, 1.02))
    below.plot([size / 1024 for size in trajectory_bytes], **ROLES["order"])
    below.set(ylabel="trajectory (KiB)", xlabel="after")
    below.set_ylim(bottom=0)
    name_ticks(below.xaxis, names, most=40, rotation=30, ha="right", rotation_mode="anchor")
    for ax in axes:
        ax.grid(axis="y")
        for place in np.flatnonzero(requested):
            ax.axvline(place, **REQUEST)
    figure.align_ylabels()
    return figure


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
    layers = list(next(iter(masks.values()), {}))
    if len(layers) > MAX_LAYERS:
        layers = [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS).round().astype(int)]
    made = []
    for layer in layers:
        rows = _rows({task: torch.as_tensor(of_task[layer]) for task, of_task in masks.items()})
        narrow = rows if rows.shape[1] <= MAX_WIDTH else F.adaptive_avg_pool1d(rows[None], MAX_WIDTH)[0]
        shared = float((rows > 0).sum(0).gt(1).float().mean())
        pixels = (narrow * 255).round().to(torch.uint8).numpy()
        made.append(LayerMasks(layer, pixels, rows.shape[1], tuple(rows.mean(1).tolist()), shared))
    return made


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


class CapacityPictures(CallbackMetric):
    """Masks and capacity as pictures, after every training and unlearning of a model with masks.

    Emits ``Figure/Masks`` (a panel per layer, a row per remaining task) and ``Figure/Capacity`` (all events so far),
    which are drawn only for loggers that show them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, float, int, bool]] = []

    def after_training_exp(self, strategy: Strategy) -> list[MetricValue]:
        """Pictures once a task is trained."""
        return self._pictures(strategy, f"task {strategy.experience.task_label}", False)

    def after_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Pictures once tasks are unlearned."""
        plan = getattr(unlearning_of(strategy), "current", None)
        gone = () if plan is None else plan.tasks
        return self._pictures(strategy, f"unlearned {', '.join(map(str, gone))}", True)

    def _pictures(self, strategy: Strategy, event: str, requested: bool) -> list[MetricValue]:
        capacity, model = network_capacity(strategy), strategy.model
        if capacity is None or not isinstance(model, TaskMaskedModel):
            return []
        self._events.append((event, capacity, trajectory_bytes(strategy) or 0, requested))
        pictures = {
            "Figure/Masks": Picture(layers_figure, list(model.masks), layer_masks(model.masks)),
            "Figure/Capacity": Picture(capacity_figure, *zip(*self._events, strict=True)),
        }
        return self.emit(strategy, pictures)

    def reset(self, strategy: Strategy | None = None) -> None:
        """Forget the events so far."""
        self._events = []

    def __str__(self) -> str:
        return "CapacityPictures"


def capacity_pictures_metrics() -> list[CapacityPictures]:
    """Pictures of masks and capacity."""
    return [CapacityPictures()]
