"""Faults of a task's samples, in words: None where there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.seeding import preserved_rng


def fault_of_inputs(x: Tensor) -> str | None:
    """Number of samples that hold NaN or infinity, and the index of the first, in words."""
    if not x.is_floating_point() or bool(x.isfinite().all()):
        return None
    return _not_finite((~x.reshape(len(x), -1).isfinite().all(1)).nonzero()[:, 0], len(x))


def fault_in_memory(experience: Any) -> str | None:
    """As :func:`fault_of_inputs`, of all samples of a task that lie in memory, before any transform."""
    find = getattr(experience, "not_finite", None)
    where = None if find is None else find()
    return None if where is None or not len(where) else _not_finite(where, len(experience.dataset))


def fault_of_task(experience: Any) -> str | None:
    """As :func:`fault_of_inputs`, of all samples of a task, as an evaluation sees them: reads each of them."""
    with preserved_rng():
        x, _ = task_data(experience)
    return fault_of_inputs(x) if isinstance(x, Tensor) else None


def _not_finite(where: Tensor, n: int) -> str:
    samples = f"{len(where)} of {n} samples hold" if len(where) > 1 else f"1 of {n} samples holds"
    return f"{samples} NaN or infinity, the first at index {int(where[0])}; take them out, or fill the gaps in"


def fault_of_labels(labels: Tensor, logits: Tensor, criterion: Any) -> str | None:
    """Labels that a cross-entropy over so many classes has no class for."""
    if not isinstance(criterion, nn.CrossEntropyLoss) or labels.dim() != 1 or labels.is_floating_point():
        return None
    taken = labels[labels != criterion.ignore_index]
    if not len(taken):
        return f"all {len(labels)} labels are {criterion.ignore_index}, which the loss ignores"
    lowest, highest = (int(label) for label in taken.aminmax())
    classes = logits.shape[1]
    if lowest >= 0 and highest < classes:
        return None
    return (
        f"its labels lie in {lowest}..{highest}, and its head has {classes} classes, 0..{classes - 1}: count the "
        "labels of a task from 0, and let the experience's classes_in_this_experience name all of them"
    )


def fault_of_shape(x: Tensor, model: nn.Module, error: Exception) -> str | None:
    """Shape or type of samples that a model can't run on, in words; None where they are not to blame."""
    if isinstance(error, torch.OutOfMemoryError):
        return None
    given, made = (tuple(x.shape[1:]), x.dtype), "a backbone that takes them"
    if isinstance(model, MaskedModel):
        expected = model.graph.input_shape, model.graph.input_dtype
        if given == expected:
            return None
        made = f"{expected[0]}, {expected[1]}, for which this model was made"
        if given[0] != expected[0]:
            made += f", or make it with input_shape={given[0]}"
    return f"the model can't run on its samples of shape {given[0]}, {given[1]} ({error}); they need {made}"
