"""Metrics and figures of the units (or weights) that tasks use: overlap of masks, and shares of each layer."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from avalanche.evaluation.metric_results import MetricValue
from matplotlib.figure import Figure
from torch import Tensor

from avalanche_amnesia.evaluation import figures
from avalanche_amnesia.evaluation.bases import CallbackMetric, EventMetric
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.evaluation.picture import Picture
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of

MAX_WIDTH = 1024
"""Largest width of a mask's image in pixels; for wider layers a pixel is the mean of neighbouring units."""
MAX_LAYERS = 24
"""Largest number of layers in a figure of masks; deeper networks show layers evenly spread over the depth."""


def mask_overlap(mask_a: Tensor, mask_b: Tensor) -> float:
    """Return the intersection over union of two binary masks ``(units,)``; 0 if both are empty."""
    union = int((mask_a | mask_b).sum())
    return int((mask_a & mask_b).sum()) / union if union else 0.0


def owners(masks: Mapping[int, Tensor]) -> dict[str, float]:
    """Return the shares of a layer's units (or weights) used by no task, by several tasks, and by one task only.

    Args:
        masks: task → bool ``(n,)``, over the units or weights of one layer; without masks all are free.

    Returns:
        ``free``, ``shared``, then each task's label → share in [0, 1]; they add up to 1. Unlearning a task frees
        the share that it uses exclusively.
    """
    if not masks:
        return {"free": 1.0, "shared": 0.0}
    users = torch.stack(list(masks.values())).sum(0)
    n = len(users)
    shares = {"free": int((users == 0).sum()) / n, "shared": int((users > 1).sum()) / n}
    return shares | {str(task): int((mask & (users == 1)).sum()) / n for task, mask in masks.items()}


def owners_by_layer(model: Any) -> dict[str, dict[str, float]] | None:
    """Return a dict of layer to shares of its units used by no, several or one task; None if the model has no masks.

    For a :class:`SubnetModel`, a layer is a parameter, and the shares are shares of its weights.
    """
    if not isinstance(model, TaskMaskedModel):
        return None
    masks = dict(model.masks)
    return {layer: owners({task: by_layer[layer] for task, by_layer in masks.items()}) for layer in model.graph.layers}


def overlap_figure(tasks: Sequence[int], overlap: Sequence[Sequence[float]]) -> Figure:
    """Draw the overlap of each pair of masks as a matrix."""
    axes: dict[str, Any] = {"rows": tasks, "columns": tasks, "row_label": "task", "column_label": "with task"}
    return figures.matrix_figure("overlap of masks (%)", overlap, **axes)


class MaskOverlap(EventMetric):
    """Metric of the mean intersection over union of two tasks' masks, over all pairs of tasks not unlearned.

    In [0, 1]; neither direction is better: overlapping tasks share units, but unlearning one of them affects the other.
    Emitted after each task and unlearning as ``MaskOverlap``, if at least two tasks remain; and as the picture
    ``Figure/Overlap`` with its table, a row and a column per task. Models without masks emit nothing.
    """

    lower_bound, upper_bound = 0.0, 1.0

    def current_values(self, strategy: Strategy) -> dict[str, Any]:
        """Return the mean overlap and the picture of all overlaps, by metric name."""
        model = strategy.model
        if not isinstance(model, TaskMaskedModel) or len(model.masks) < 2:
            return {}
        tasks, masks = list(model.masks), [model.binary_mask(task) for task in model.masks]
        rows = [[mask_overlap(a, b) for b in masks] for a in masks]
        table = figures.Table(("task", *map(str, tasks)), tuple((t, *row) for t, row in zip(tasks, rows, strict=True)))
        mean = fmean(mask_overlap(a, b) for a, b in combinations(masks, 2))
        return {str(self): mean, "Figure/Overlap": Picture(overlap_figure, tasks, rows, table=table)}


class Owners(EventMetric):
    """Metric of each layer's shares of units (or weights) that are free, used by several tasks, or by one task only.

    Each share is in [0, 1]; they add up to 1. Emitted after each task and unlearning as ``Owners/<layer>/free``,
    ``Owners/<layer>/shared`` and ``Owners/<layer>/Task000`` …: units of a masked model, weights of a SubnetModel.
    ``OwnersBefore/…`` are the same shares before each unlearning. Models without masks emit nothing.
    """

    lower_bound, upper_bound = 0.0, 1.0

    def before_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Before an unlearning: return each layer's shares of units used by no, several or one task, as metrics."""
        before = {f"OwnersBefore{name.removeprefix(str(self))}": s for name, s in self.current_values(strategy).items()}
        return self.emit(strategy, before)

    def current_values(self, strategy: Strategy) -> dict[str, Any]:
        """Return each layer's current shares of units (free, shared, or used by one task only), by metric name."""
        layers = owners_by_layer(strategy.model) or {}
        return {
            f"{self}/{layer}/{f'Task{int(owner):03d}' if owner.isdigit() else owner}": share
            for layer, shares in layers.items()
            for owner, share in shares.items()
        }


def mask_overlap_metrics() -> list[MaskOverlap]:
    """Return a list with the metric of the overlap of the tasks' masks (a mean and a picture)."""
    return [MaskOverlap()]


def owners_metrics() -> list[Owners]:
    """Return a list with the metric of each layer's shares of units (or weights): free, shared, or used by one task."""
    return [Owners()]


@figures.house_style
def capacity_figure(names: Sequence[str], capacity: Sequence[float], requested: Sequence[bool]) -> Figure:
    """Draw the free capacity after every training and unlearning; vertical lines mark unlearnings."""
    room = 3.5 * max(map(len, names), default=0)  # for slanted names
    figure = figures.new_figure(170 + room, min(max(figures.WIDTH, 32 * len(names) + 80), 1440))
    ax = figure.subplots()
    ax.plot(capacity, color=figures.COLOURS["here"], marker="o")
    ax.set(ylabel="free capacity", ylim=(0, 1.02), xlabel="after")
    figures.label_ticks(ax.xaxis, names, most=40, rotation=30, ha="right", rotation_mode="anchor")
    ax.grid(axis="y")
    for place in (at for at, asked in enumerate(requested) if asked):
        ax.axvline(place, **figures.REQUEST)
    return figure


@figures.house_style
def masks_figure(masks: Mapping[int, Mapping[str, Tensor]]) -> Figure:
    """Draw the units (or weights) that each remaining task uses: a panel per layer, a row per task.

    Args:
        masks: task label -> layer -> mask of shape (units,), in [0, 1]. Layers wider than 1,024 units show the mean of
            neighbours; networks with more than 24 layers show 24 layers evenly spread over the depth.
    """
    layers = list(next(iter(masks.values()), {}))
    if len(layers) > MAX_LAYERS:
        layers = [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS).round().astype(int)]
    figure = figures.new_figure(60 + max(len(layers), 1) * (48 + 14 * max(len(masks), 1)), width=580)
    if not layers:
        figure.text(0.5, 0.5, "no task remains: no mask", ha="center", va="center")
        return figure
    axes = figure.subplots(len(layers), 1, squeeze=False)[:, 0]
    for ax, layer in zip(axes, layers, strict=True):
        rows = torch.stack([of_task[layer].detach().to("cpu", torch.float32) for of_task in masks.values()])
        n_tasks, units = rows.shape
        pixels = rows if units <= MAX_WIDTH else F.adaptive_avg_pool1d(rows[None], MAX_WIDTH)[0]
        look = {"cmap": figures.SHARES, "vmin": 0, "vmax": 1, "extent": (-0.5, units - 0.5, n_tasks - 0.5, -0.5)}
        ax.imshow(pixels, aspect="auto", interpolation="nearest", **look)
        shared = float((rows > 0).sum(0).gt(1).float().mean())
        title = f"{layer}: {units} entries, {shared:.0%} shared by several tasks"
        ax.set_title(title, fontsize=figures.SMALL, loc="left")
        names = [f"task {task}: {used:.0%}" for task, used in zip(masks, rows.mean(1).tolist(), strict=True)]
        ax.set_yticks(range(n_tasks), names)
        ax.tick_params(labelsize=figures.SMALL)
    axes[-1].set_xlabel("unit (or weight) of the layer; dark: used")
    return figure


class CapacityPictures(CallbackMetric):
    """Metric that emits pictures of masks and capacity after every task and unlearning of a model with masks.

    Emits ``Figure/Masks`` (a panel per layer, a row per remaining task) and ``Figure/Capacity`` (all events so far).
    They are drawn only for loggers that can show them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, float, bool]] = []

    def after_training_exp(self, strategy: Strategy) -> list[MetricValue]:
        """After a task's training: return the pictures of masks and capacity."""
        return self._make_pictures(strategy, f"task {strategy.experience.task_label}", False)

    def after_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """After an unlearning: return the pictures of masks and capacity."""
        plan = getattr(unlearning_of(strategy), "current", None)
        gone = () if plan is None else plan.tasks
        return self._make_pictures(strategy, f"unlearned {', '.join(map(str, gone))}", True)

    def _make_pictures(self, strategy: Strategy, event: str, requested: bool) -> list[MetricValue]:
        capacity, model = network_capacity(strategy), strategy.model
        if capacity is None or not isinstance(model, TaskMaskedModel):
            return []
        self._events.append((event, capacity, requested))
        pictures = {
            "Figure/Masks": Picture(masks_figure, dict(model.masks)),
            "Figure/Capacity": Picture(capacity_figure, *zip(*self._events, strict=True)),
        }
        return self.emit(strategy, pictures)

    def reset(self, strategy: Strategy | None = None) -> None:
        """Delete the stored events (trained tasks and unlearnings), so that the capacity picture starts empty."""
        self._events = []


def capacity_pictures_metrics() -> list[CapacityPictures]:
    """Return a list with the metric that emits pictures of masks and of free capacity."""
    return [CapacityPictures()]
