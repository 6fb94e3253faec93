"""Part of the training loss that is the masks' regulariser."""

from typing import Any

from avalanche.evaluation.metric_results import MetricValue

from avalanche_amnesia.evaluation.event_metric import CallbackMetric
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin


class MaskRegulariser(CallbackMetric):
    """``λ·R`` of HAT's loss, at the last mini-batch of every epoch; what remains of the loss is the criterion's.

    At the end of an epoch the gate's scale is largest, so that this is the regulariser of the mask in use.
    Emits nothing for strategies without HAT's masks.
    """

    axis = "iteration"
    """Axis along which a logger draws it."""

    def after_training_epoch(self, strategy: Strategy) -> MetricValue | None:
        """The value at the end of the epoch."""
        plugin = find_plugin(strategy, HATPlugin)
        if plugin is None:
            return None
        now: Any = plugin.in_training
        task = int(strategy.experience.task_label)
        name = f"MaskRegulariser_Epoch/train_phase/train_stream/Task{task:03d}"
        return MetricValue(self, name, float(now.regulariser(now.gate.detach())), strategy.clock.train_iterations)

    def __str__(self) -> str:
        return "MaskRegulariser"


def mask_regulariser_metrics() -> list[MaskRegulariser]:
    """Metric helper: the masks' regulariser beside ``loss_metrics(epoch=True)``."""
    return [MaskRegulariser()]
