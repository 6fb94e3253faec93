"""Metrics of capacity: what is still free, units or weights in use by each task, bytes of trajectory."""

from __future__ import annotations

from typing import Any

from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue

from avalanche_amnesia.evaluation.figures import Picture, capacity_figure, overlap_figure
from avalanche_amnesia.evaluation.functional import mask_overlap
from avalanche_amnesia.evaluation.heatmap import layer_masks, layers_figure
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.training.host.lookup import find_plugin, unlearning_of
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin


def network_capacity(strategy: Any) -> float | None:
    """Mean adjustment rate over all backbone parameters that a next task would meet: 1 all free, 0 full.

    AdaHAT's network capacity (Wang et al., ECML-PKDD 2024): with AdaHAT's rule the rate of a parameter is
    ``r / (importance + r)``, with HAT's ``1 − min(a_i, a_j)``. Where the strategy has ``locked`` tasks, only their
    masks count. None for strategies without masks.
    """
    masking = find_plugin(strategy, TaskMaskPlugin)
    if masking is None or not isinstance(strategy.model, TaskMaskedModel):
        return None
    return masking.rule.capacity(masking.task_use(strategy.model))


def trajectory_bytes(strategy: Any) -> int | None:
    """Bytes that the recorded trajectory takes; None where none is recorded."""
    recorder = find_plugin(strategy, TrajectoryPlugin)
    return None if recorder is None else recorder.trajectory.nbytes()


class Capacity(PluginMetric):
    """Network capacity, units or weights in use, masks and their overlap, bytes of trajectory, at every event.

    Emits, after trainings and unlearnings, ``Capacity`` in [0, 1] (1: all free), ``MaskUse/<layer>`` (share of the
    layer's units, or of the tensor's weights, that remaining tasks use), ``TrajectoryBytes``, ``MaskBits`` (of a
    SubnetModel: bits per weight and task that the masks take, entropy-coded given the weights), and, unless ``images``
    is False, the pictures ``Figure/Masks`` (a panel per layer, a row per remaining task), ``Figure/Overlap`` (of every
    two masks) and ``Figure/Capacity`` (all events so far). Pictures are drawn only for loggers that show them.
    """

    axis = "event"
    """Axis along which a logger draws it: it changes with tasks and unlearnings."""

    def __init__(self, *, images: bool = True) -> None:
        super().__init__()
        self.images = images
        self._events: list[tuple[str, float, int, tuple[int, ...]]] = []

    def after_training_exp(self, strategy: Any) -> list[MetricValue]:
        """Values once a task is trained."""
        return self._values(strategy, f"task {strategy.experience.task_label}", ())

    def after_unlearning(self, strategy: Any) -> list[MetricValue]:
        """Values once tasks are unlearned."""
        plan = getattr(unlearning_of(strategy), "current", None)
        return self._values(strategy, "unlearning", () if plan is None else plan.tasks)

    def _values(self, strategy: Any, event: str, unlearned: tuple[int, ...]) -> list[MetricValue]:
        capacity, kept = network_capacity(strategy), trajectory_bytes(strategy)
        named: dict[str, Any] = {"Capacity": capacity, "TrajectoryBytes": kept}
        model = strategy.model
        if capacity is not None and isinstance(model, TaskMaskedModel):
            self._events.append((event, capacity, kept or 0, unlearned))
            for layer, used in model.by_layer(model.cumulative_mask()).items():
                named[f"MaskUse/{layer}"] = float(used.float().mean())
            named["MaskBits"] = model.mask_bits()
            if self.images:
                names, history, sizes, gone = zip(*self._events, strict=True)
                named["Figure/Masks"] = Picture(layers_figure, list(model.masks), layer_masks(model.masks))
                named["Figure/Overlap"] = Picture(overlap_figure, _overlap(model))
                named["Figure/Capacity"] = Picture(capacity_figure, history, sizes, gone, names)
        x = strategy.clock.train_iterations
        return [MetricValue(self, name, value, x) for name, value in named.items() if value is not None]

    def result(self, strategy: Any = None) -> None:
        """Values are emitted by the callbacks alone."""

    def reset(self, strategy: Any = None) -> None:
        """Forget the events so far."""
        self._events = []

    def __str__(self) -> str:
        return "Capacity"


def _overlap(model: TaskMaskedModel) -> dict[int, dict[int, float]]:
    masks = {task: model.binary_mask(task) for task in model.masks}
    return {a: {b: mask_overlap(masks[a], masks[b]) for b in masks} for a in masks}


def capacity_metrics(*, images: bool = True) -> list[Capacity]:
    """Capacity, mask use, pictures of masks and capacity (unless ``images=False``) and bytes of trajectory."""
    return [Capacity(images=images)]
