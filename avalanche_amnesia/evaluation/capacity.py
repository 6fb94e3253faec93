"""Metrics after every training and unlearning: free capacity, units or weights in use, bytes of recorded updates."""

from typing import Any

from avalanche.evaluation.metric_results import MetricValue

from avalanche_amnesia.evaluation.bases import EventMetric
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin


def network_capacity(strategy: Strategy) -> float | None:
    """Return the backbone's free capacity, from 0 (the next task can change no weight) to 1 (it can change all freely).

    Mean over all weights of the share of an update that is allowed: in HAT ``1 − min(a_i, a_j)``, cumulative masks of
    the weight's units; in AdaHAT (Wang et al., ECML-PKDD 2024) ``r / (n + r)``, rate ``r``, used by ``n`` tasks. If the
    rule protects only ``locked`` tasks, only they count. Weight pools: share of weights without owner. Others: None.
    """
    if isinstance(strategy.model, MultiHeadModel) and (free := strategy.model.free_share()) is not None:
        return free
    masking = find_plugin(strategy, TaskMaskPlugin)
    if masking is None or not isinstance(strategy.model, TaskMaskedModel):
        return None
    return masking.rule.capacity(masking.task_use(strategy.model))


def trajectory_bytes(strategy: Strategy) -> int | None:
    """Return the size in bytes of all recorded weight updates (the trajectory); None if the strategy records none."""
    recorder = find_plugin(strategy, TrajectoryPlugin)
    return None if recorder is None else recorder.trajectory.nbytes()


class Capacity(EventMetric):
    """Metric: free capacity, units or weights in use, and bytes of recorded updates, after a training or unlearning.

    Emits, after trainings and unlearnings, ``Capacity`` in [0, 1] (1: all free), ``MaskUse/<layer>`` (share of the
    layer's units, or of the tensor's weights, that remaining tasks use), ``TrajectoryBytes`` and ``MaskBits`` (of a
    SubnetModel: bits per weight and task that the masks take, entropy-coded given the weights). Around an unlearning
    also ``CapacityBefore``, and ``CapacityReturned``, in [−1, 1]: capacity after it minus capacity before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: float | None = None

    def before_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Before an unlearning: store the free capacity, and return it as ``CapacityBefore``."""
        self._before = network_capacity(strategy)
        return self.emit(strategy, {"CapacityBefore": self._before})

    def after_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """After an unlearning: return all values, and the capacity that it freed."""
        named = self.current_values(strategy)
        if self._before is not None:
            named["CapacityReturned"] = named["Capacity"] - self._before
        return self.emit(strategy, named)

    def current_values(self, strategy: Strategy) -> dict[str, Any]:
        """Return values by metric name: free capacity, bytes of recorded updates, mask use per layer, mask bits."""
        named: dict[str, Any] = {"Capacity": network_capacity(strategy), "TrajectoryBytes": trajectory_bytes(strategy)}
        model = strategy.model
        if isinstance(model, TaskMaskedModel):
            for layer, used in model.by_layer(model.cumulative_mask()).items():
                named[f"MaskUse/{layer}"] = float(used.float().mean())
            named["MaskBits"] = model.mask_bits()
        return named


def capacity_metrics() -> list[Capacity]:
    """Return a list with the metric :class:`Capacity`."""
    return [Capacity()]
