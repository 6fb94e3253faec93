"""Overlap of the remaining tasks' masks, pair by pair."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from avalanche_amnesia.evaluation.event_metric import EventMetric
from avalanche_amnesia.evaluation.figures import Cell, Picture, Table, matrix_figure
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy


def mask_overlap(mask_a: Tensor, mask_b: Tensor) -> float:
    """Intersection over union of two binary masks ``(units,)``; 0 for two empty ones."""
    union = int((mask_a | mask_b).sum())
    return int((mask_a & mask_b).sum()) / union if union else 0.0


def overlap_matrix(masks: Mapping[int, Tensor]) -> Tensor:
    """Intersection over union of every two tasks' masks: Jaccard's index ``|a ∩ b| / |a ∪ b|``.

    Args:
        masks: task → bool ``(n,)``, over units or weights, all of one length.

    Returns:
        Float64 ``(tasks, tasks)`` in the mapping's order, symmetric, in [0, 1]; 1 on the diagonal, 0 for an empty mask.

    Raises:
        ValueError: for masks that are not bool, or of different shapes.
    """
    shapes = {(tuple(mask.shape), mask.dtype) for mask in masks.values()}
    if len(shapes) > 1 or any(dtype != torch.bool or len(shape) != 1 for shape, dtype in shapes):
        raise ValueError(f"masks must be bool tensors of one shape (n,), got {sorted(map(str, shapes))}")
    rows = list(masks.values())
    matrix = torch.diag(torch.tensor([mask_overlap(row, row) for row in rows], dtype=torch.float64))
    for i, j in combinations(range(len(rows)), 2):
        matrix[i, j] = matrix[j, i] = mask_overlap(rows[i], rows[j])
    return matrix


def mean_overlap(matrix: Tensor) -> float | None:
    """Mean over pairs of different tasks of an :func:`overlap_matrix`, in [0, 1]; None for fewer than two tasks."""
    n = len(matrix)
    return float((matrix.sum() - matrix.trace()) / (n * (n - 1))) if n > 1 else None


def overlap_figure(tasks: Sequence[int], overlap: Sequence[Sequence[float]]) -> Figure:
    """Overlap of every two tasks' masks."""
    return matrix_figure(
        {"overlap of masks (%)": [[Cell(share) for share in row] for row in overlap]},
        rows=tasks,
        columns=tasks,
        row_label="task",
        column_label="with task",
    )


class MaskOverlap(EventMetric):
    """Mean intersection over union of the remaining tasks' masks, pair by pair, after tasks and unlearnings.

    In [0, 1]; neither direction is better: tasks that overlap share what they learned, and what unlearning one of them
    takes from the other. Emitted as ``MaskOverlap`` from the second remaining task on, and, unless ``images`` is
    False, as the picture ``Figure/Overlap`` with its table, a row and a column per task. Models without masks emit
    nothing.
    """

    lower_bound, upper_bound = 0.0, 1.0

    def __init__(self, *, images: bool = True) -> None:
        super().__init__()
        self.images = images

    def named(self, strategy: Strategy) -> dict[str, Any]:
        """Name → value, as the strategy stands."""
        model = strategy.model
        if not isinstance(model, TaskMaskedModel) or len(model.masks) < 2:
            return {}
        matrix = overlap_matrix({task: model.binary_mask(task) for task in model.masks})
        named: dict[str, Any] = {str(self): mean_overlap(matrix)}
        if self.images:
            tasks, rows = list(model.masks), matrix.tolist()
            table = Table(("task", *map(str, tasks)), tuple((t, *row) for t, row in zip(tasks, rows, strict=True)))
            named["Figure/Overlap"] = Picture(overlap_figure, tasks, rows, table=table)
        return named

    def __str__(self) -> str:
        return "MaskOverlap"


def mask_overlap_metrics(*, images: bool = True) -> list[MaskOverlap]:
    """Overlap of the remaining tasks' masks, as a mean and (unless ``images=False``) as a picture."""
    return [MaskOverlap(images=images)]
