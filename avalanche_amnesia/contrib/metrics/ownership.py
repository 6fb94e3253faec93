"""Owners of a layer's units or weights: no task, several tasks, or only one."""

from collections.abc import Mapping
from typing import Any

import torch
from avalanche.evaluation.metric_results import MetricValue
from torch import Tensor

from avalanche_amnesia.evaluation.event_metric import EventMetric
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy


def owners(masks: Mapping[int, Tensor]) -> dict[str, float]:
    """Shares of a layer that no task uses, that several use, and that only one task uses.

    Args:
        masks: task → bool ``(n,)`` over the units or weights of one layer; empty: all is free.

    Returns:
        ``free``, ``shared``, then each task's label → share in [0, 1]; they add up to 1. What only one task
        uses is what its unlearning frees.

    Raises:
        ValueError: for masks that are not bool, empty, or of different shapes.
    """
    if not masks:
        return {"free": 1.0, "shared": 0.0}
    shapes = {(tuple(mask.shape), mask.dtype) for mask in masks.values()}
    if len(shapes) > 1 or any(dtype != torch.bool or len(shape) != 1 or 0 in shape for shape, dtype in shapes):
        raise ValueError(f"masks must be bool tensors of one shape (n,), n > 0, got {sorted(map(str, shapes))}")
    users = torch.stack([mask.to(torch.int64) for mask in masks.values()]).sum(0)
    n = len(users)
    shares = {"free": int((users == 0).sum()) / n, "shared": int((users > 1).sum()) / n}
    return shares | {str(task): int((mask & (users == 1)).sum()) / n for task, mask in masks.items()}


def owners_by_layer(model: Any) -> dict[str, dict[str, float]] | None:
    """Layer → its :func:`owners` among the remaining tasks; None for a model without task masks.

    Args:
        model: any; of a SubnetModel a layer is a parameter, and shares are of its weights.
    """
    if not isinstance(model, TaskMaskedModel):
        return None
    masks = {task: model.by_layer(model.binary_mask(task)) for task in model.masks}
    return {layer: owners({task: by_layer[layer] for task, by_layer in masks.items()}) for layer in model.graph.layers}


class Owners(EventMetric):
    """Shares of every layer that are free, shared, and owned by only one remaining task.

    Each in [0, 1], together 1. Emitted after tasks and unlearnings as ``Owners/<layer>/free``,
    ``Owners/<layer>/shared`` and ``Owners/<layer>/Task000`` …: units of a masked model, weights of a SubnetModel.
    ``OwnersBefore/…`` are the same before each unlearning. Models without masks emit nothing.
    """

    lower_bound, upper_bound = 0.0, 1.0

    def before_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Values with the tasks that are about to go."""
        before = {f"OwnersBefore{name.removeprefix(str(self))}": s for name, s in self.named(strategy).items()}
        return self.emit(strategy, before)

    def named(self, strategy: Strategy) -> dict[str, Any]:
        """Name → share, as the strategy stands."""
        layers = owners_by_layer(strategy.model) or {}
        return {
            f"{self}/{layer}/{f'Task{int(owner):03d}' if owner.isdigit() else owner}": share
            for layer, shares in layers.items()
            for owner, share in shares.items()
        }

    def __str__(self) -> str:
        return "Owners"


def owners_metrics() -> list[Owners]:
    """Shares of every layer that are free, shared, or owned by only one task."""
    return [Owners()]
