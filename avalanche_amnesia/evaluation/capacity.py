"""Metrics of capacity at every event: what is still free, units or weights in use, bytes of trajectory."""

from __future__ import annotations

from typing import Any

from avalanche.evaluation.metric_results import MetricValue

from avalanche_amnesia.evaluation.event_metric import EventMetric
from avalanche_amnesia.evaluation.figures import Picture, capacity_figure
from avalanche_amnesia.evaluation.heatmap import layer_masks, layers_figure
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin, unlearning_of
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin


def network_capacity(strategy: Strategy) -> float | None:
    """Mean adjustment rate over all backbone parameters that a next task would meet: 1 all free, 0 full.

    AdaHAT's network capacity (Wang et al., ECML-PKDD 2024): with AdaHAT's rule the rate of a parameter is
    ``r / (importance + r)``, with HAT's ``1 − min(a_i, a_j)``. Where the strategy has ``locked`` tasks, only their
    masks count. None for strategies without masks.
    """
    masking = find_plugin(strategy, TaskMaskPlugin)
    if masking is None or not isinstance(strategy.model, TaskMaskedModel):
        return None
    return masking.rule.capacity(masking.task_use(strategy.model))


def trajectory_bytes(strategy: Strategy) -> int | None:
    """Bytes that the recorded trajectory takes; None where none is recorded."""
    recorder = find_plugin(strategy, TrajectoryPlugin)
    return None if recorder is None else recorder.trajectory.nbytes()


class Capacity(EventMetric):
    """Network capacity, units or weights in use, masks as pictures, bytes of trajectory, at every event.

    Emits, after trainings and unlearnings, ``Capacity`` in [0, 1] (1: all free), ``MaskUse/<layer>`` (share of the
    layer's units, or of the tensor's weights, that remaining tasks use), ``TrajectoryBytes``, ``MaskBits`` (of a
    SubnetModel: bits per weight and task that the masks take, entropy-coded given the weights), and, unless ``images``
    is False, the pictures ``Figure/Masks`` (a panel per layer, a row per remaining task) and ``Figure/Capacity`` (all
    events so far), which are drawn only for loggers that show them. Around an unlearning also ``CapacityBefore``, and
    ``CapacityReturned``, in [−1, 1]: capacity after it minus capacity before.
    """

    def __init__(self, *, images: bool = True) -> None:
        super().__init__()
        self.images = images
        self._before: float | None = None
        self._events: list[tuple[str, float, int, bool]] = []

    def after_training_exp(self, strategy: Strategy) -> list[MetricValue]:
        """Values once a task is trained."""
        return self.emit(strategy, self._noted(strategy, f"task {strategy.experience.task_label}", False))

    def before_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Capacity with the tasks that are about to go."""
        self._before = network_capacity(strategy)
        return self.emit(strategy, {"CapacityBefore": self._before})

    def after_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Values once tasks are unlearned, and the capacity that came back."""
        plan = getattr(unlearning_of(strategy), "current", None)
        gone = () if plan is None else plan.tasks
        named = self._noted(strategy, f"unlearned {', '.join(map(str, gone))}", True)
        if self._before is not None:
            named["CapacityReturned"] = named["Capacity"] - self._before
        return self.emit(strategy, named)

    def named(self, strategy: Strategy) -> dict[str, Any]:
        """Name → value, as the strategy stands; without pictures."""
        named: dict[str, Any] = {"Capacity": network_capacity(strategy), "TrajectoryBytes": trajectory_bytes(strategy)}
        model = strategy.model
        if isinstance(model, TaskMaskedModel):
            for layer, used in model.by_layer(model.cumulative_mask()).items():
                named[f"MaskUse/{layer}"] = float(used.float().mean())
            named["MaskBits"] = model.mask_bits()
        return named

    def _noted(self, strategy: Strategy, event: str, requested: bool) -> dict[str, Any]:
        """Values and pictures at an event, which is one more in the picture of the capacity."""
        named = self.named(strategy)
        if named["Capacity"] is not None:
            self._events.append((event, named["Capacity"], named["TrajectoryBytes"] or 0, requested))
        model = strategy.model
        if self.images and self._events and isinstance(model, TaskMaskedModel):
            named["Figure/Masks"] = Picture(layers_figure, list(model.masks), layer_masks(model.masks))
            named["Figure/Capacity"] = Picture(capacity_figure, *zip(*self._events, strict=True))
        return named

    def reset(self, strategy: Strategy | None = None) -> None:
        """Forget the events so far."""
        self._events = []

    def __str__(self) -> str:
        return "Capacity"


def capacity_metrics(*, images: bool = True) -> list[Capacity]:
    """Capacity, mask use, pictures of masks and capacity, and bytes of trajectory.

    Args:
        images: whether the pictures are drawn.
    """
    return [Capacity(images=images)]
