"""Metrics of a training's steps: capacity in each, and the masks' part of the loss at the end of each epoch."""

from typing import Any

from avalanche.evaluation.metric_results import MetricValue

from avalanche_amnesia.evaluation.bases import CallbackMetric
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin


class StepCapacity(CallbackMetric):
    """Network capacity in every step of a training, as AdaHAT's authors plot it: the mean rate of that step's updates.

    Emits ``Capacity_MB/train_phase/train_stream/Task<label>`` in [0, 1] behind every mini-batch.
    :class:`~avalanche_amnesia.evaluation.Capacity` says what a *next* task would meet, before its mask is known
    (``κ = 0``, and the mean of a random rate); this is what the task in training met: with AdaHAT's rule
    ``r_l / (importance + r_l)`` with ``κ_l`` of the gate at this mini-batch, with ``random`` the numbers that were
    drawn. What is frozen whatever the rule says counts as frozen. Nothing for strategies without masks.

    Reference: Wang et al., AdaHAT, ECML-PKDD 2024, network capacity.
    """

    axis = "iteration"
    """Axis along which a logger draws it."""

    def after_training_iteration(self, strategy: Strategy) -> MetricValue | None:
        """The value of this step."""
        masking = find_plugin(strategy, TaskMaskPlugin)
        if masking is None:
            return None
        name = f"Capacity_MB/train_phase/train_stream/Task{int(strategy.experience.task_label):03d}"
        return MetricValue(self, name, masking.in_training.adjuster.rate(), strategy.clock.train_iterations)

    def __str__(self) -> str:
        return "StepCapacity"


class MaskRegulariser(CallbackMetric):
    """``λ·R`` of HAT's loss, at the last mini-batch of every epoch; what remains of the loss is the criterion's.

    Emits ``MaskRegulariser_Epoch/train_phase/train_stream/Task<label>``. At the end of an epoch the gate's scale is
    largest, so that this is the regulariser of the mask in use. Nothing for strategies without HAT's masks.
    """

    axis = "iteration"

    def after_training_epoch(self, strategy: Strategy) -> MetricValue | None:
        """The value at the end of the epoch."""
        plugin = find_plugin(strategy, HATPlugin)
        if plugin is None:
            return None
        now: Any = plugin.in_training
        name = f"MaskRegulariser_Epoch/train_phase/train_stream/Task{int(strategy.experience.task_label):03d}"
        return MetricValue(self, name, float(now.regulariser(now.gate.detach())), strategy.clock.train_iterations)

    def __str__(self) -> str:
        return "MaskRegulariser"


def step_capacity_metrics() -> list[StepCapacity]:
    """Capacity of every training step."""
    return [StepCapacity()]


def mask_regulariser_metrics() -> list[MaskRegulariser]:
    """The masks' regulariser, beside ``loss_metrics(epoch=True)``."""
    return [MaskRegulariser()]
