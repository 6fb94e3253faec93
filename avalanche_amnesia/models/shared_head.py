"""One head that all tasks share (domain-incremental learning: the task label picks the mask)."""

import torch
from torch import nn

from avalanche_amnesia import checks
from avalanche_amnesia.unit_graph.findings import ModelError

SHARED_HEAD = "_shared_head"
"""Its name in the backbone, of whose parameters it is one."""


class SharedHead(nn.Module):
    """Placeholder among the heads, for a task whose head is the one that all tasks share."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(n_classes, 0))  # a saved state tells the task by it


def add_shared_head(backbone: nn.Module, n_features: int, n_classes: int) -> None:
    """Give a backbone the head that all tasks share: without a bias, which would belong to all tasks at once."""
    number = checks.integer(n_classes)
    if number is None or number < 1:
        raise ValueError(f"shared_head must be the number of classes (an int of at least 1) or None: {n_classes!r}")
    like = next(backbone.parameters())
    head = nn.Linear(n_features, number, bias=False, device=like.device, dtype=like.dtype)
    backbone.add_module(SHARED_HEAD, head)


def stand_in(shared: nn.Linear, n_classes: int) -> SharedHead:
    """Placeholder among the heads for a task of so many classes."""
    if n_classes != shared.out_features:
        raise ModelError(
            f"a task has {n_classes} classes, the shared head has {shared.out_features}: all tasks must have the "
            f"same classes; use MaskedModel(backbone, shared_head={n_classes}), or a head per task (None)"
        )
    return SharedHead(n_classes).to(shared.weight.device)
