"""Entries of a backbone that a task was the first to use, or whose units are in use by then."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import inside_backbone


def entries_in_use(model: MaskedModel, task: int) -> dict[str, Tensor]:
    """Parameter name in the backbone → bool tensor of its shape: what the task's mask covers; all without a mask."""
    parameters = dict(model.named_parameters())
    return inside_backbone({name: covered.expand(parameters[name].shape) for name, covered in model.entries_of(task)})


def first_used(model: MaskedModel, task: int, earlier: Iterable[int]) -> dict[str, Tensor]:
    """Parameter name in the backbone → bool tensor of its shape: what the task uses and no earlier one does."""
    result = entries_in_use(model, task)
    for other in earlier:
        used = entries_in_use(model, other)
        result = {name: own & ~used[name] for name, own in result.items()}
    return result


def units_used(model: MaskedModel, tasks: Iterable[int]) -> dict[str, Tensor]:
    """Parameter name in the backbone → bool tensor of its shape: the entries of the units in the tasks' masks."""
    parameters = dict(model.backbone.named_parameters())
    units = torch.stack([model.binary_mask(task) for task in tasks]).any(0)
    return {name: rows.expand_as(parameters[name]) for name, rows in model.graph.entries_of_units(units).items()}
