"""Sharing of units (or weights) between the remaining tasks: overlap of masks, and owners of a layer."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from avalanche.evaluation.metric_results import MetricValue
from matplotlib.figure import Figure
from torch import Tensor

from avalanche_amnesia.evaluation.bases import EventMetric
from avalanche_amnesia.evaluation.figures import Cell, Table, matrix_figure
from avalanche_amnesia.evaluation.picture import Picture
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy


def mask_overlap(mask_a: Tensor, mask_b: Tensor) -> float:
    """Intersection over union of two binary masks ``(units,)``; 0 for two empty ones."""
    union = int((mask_a | mask_b).sum())
    return int((mask_a & mask_b).sum()) / union if union else 0.0


def overlap_matrix(masks: Mapping[int, Tensor]) -> Tensor:
    """Jaccard's index ``|a ∩ b| / |a ∪ b|`` of every two tasks' masks: task → bool ``(n,)``, over units or weights.

    Float64 ``(tasks, tasks)`` in the mapping's order, symmetric, in [0, 1]; 1 on the diagonal, 0 for an empty mask.
    ``ValueError`` for masks that are not bool, or of different shapes.
    """
    _check(masks)
    rows = list(masks.values())
    matrix = torch.diag(torch.tensor([mask_overlap(row, row) for row in rows], dtype=torch.float64))
    for i, j in combinations(range(len(rows)), 2):
        matrix[i, j] = matrix[j, i] = mask_overlap(rows[i], rows[j])
    return matrix


def mean_overlap(matrix: Tensor) -> float | None:
    """Mean over pairs of different tasks of an :func:`overlap_matrix`, in [0, 1]; None for fewer than two tasks."""
    n = len(matrix)
    return float((matrix.sum() - matrix.trace()) / (n * (n - 1))) if n > 1 else None


def owners(masks: Mapping[int, Tensor]) -> dict[str, float]:
    """Shares of a layer that no task uses, that several use, and that only one task uses.

    Args:
        masks: task → bool ``(n,)``, n > 0, over the units or weights of one layer; empty: all is free.

    Returns:
        ``free``, ``shared``, then each task's label → share in [0, 1]; they add up to 1. What only one task
        uses is what its unlearning frees.

    Raises:
        ValueError: for masks that are not bool, empty, or of different shapes.
    """
    _check(masks, empty=False)
    if not masks:
        return {"free": 1.0, "shared": 0.0}
    users = torch.stack([mask.to(torch.int64) for mask in masks.values()]).sum(0)
    n = len(users)
    shares = {"free": int((users == 0).sum()) / n, "shared": int((users > 1).sum()) / n}
    return shares | {str(task): int((mask & (users == 1)).sum()) / n for task, mask in masks.items()}


def _check(masks: Mapping[int, Tensor], empty: bool = True) -> None:
    shapes = {(tuple(mask.shape), mask.dtype) for mask in masks.values()}
    fit = all(dtype == torch.bool and len(shape) == 1 and (empty or 0 not in shape) for shape, dtype in shapes)
    if len(shapes) > 1 or not fit:
        least = "" if empty else ", n > 0"
        raise ValueError(f"masks must be bool tensors of one shape (n,){least}, got {sorted(map(str, shapes))}")


def owners_by_layer(model: Any) -> dict[str, dict[str, float]] | None:
    """Layer → its :func:`owners` among the remaining tasks; None for a model without task masks.

    Of a :class:`SubnetModel` a layer is a parameter, and shares are of its weights.
    """
    if not isinstance(model, TaskMaskedModel):
        return None
    masks = {task: model.by_layer(model.binary_mask(task)) for task in model.masks}
    return {layer: owners({task: by_layer[layer] for task, by_layer in masks.items()}) for layer in model.graph.layers}


def overlap_figure(tasks: Sequence[int], overlap: Sequence[Sequence[float]]) -> Figure:
    """Overlap of every two tasks' masks."""
    cells = {"overlap of masks (%)": [[Cell(share) for share in row] for row in overlap]}
    return matrix_figure(cells, rows=tasks, columns=tasks, row_label="task", column_label="with task")


class MaskOverlap(EventMetric):
    """Mean intersection over union of the remaining tasks' masks, pair by pair, after tasks and unlearnings.

    In [0, 1]; neither direction is better: tasks that overlap share what they learned, and what unlearning one of them
    takes from the other. Emitted as ``MaskOverlap`` from the second remaining task on, and as the picture
    ``Figure/Overlap`` with its table, a row and a column per task. Models without masks emit nothing.
    """

    lower_bound, upper_bound = 0.0, 1.0

    def named(self, strategy: Strategy) -> dict[str, Any]:
        """Name → value, as the strategy stands."""
        model = strategy.model
        if not isinstance(model, TaskMaskedModel) or len(model.masks) < 2:
            return {}
        matrix = overlap_matrix({task: model.binary_mask(task) for task in model.masks})
        tasks, rows = list(model.masks), matrix.tolist()
        table = Table(("task", *map(str, tasks)), tuple((t, *row) for t, row in zip(tasks, rows, strict=True)))
        return {str(self): mean_overlap(matrix), "Figure/Overlap": Picture(overlap_figure, tasks, rows, table=table)}

    def __str__(self) -> str:
        return "MaskOverlap"


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


def mask_overlap_metrics() -> list[MaskOverlap]:
    """Overlap of the remaining tasks' masks, as a mean and as a picture."""
    return [MaskOverlap()]


def owners_metrics() -> list[Owners]:
    """Shares of every layer that are free, shared, or owned by only one task."""
    return [Owners()]
