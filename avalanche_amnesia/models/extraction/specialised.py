"""One task's forward as a plain graph: its masks become constants, its own norms and its head become modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.masked_backbone import MaskedBackbone
from avalanche_amnesia.models.masking import masked


class TaskForward(nn.Module):
    """What a masked model computes for one task, from the input to the logits.

    Args:
        backbone: of the model.
        own: the task's own modules.
        head: the task's head.
        masks: layer name → ``(units,)``.
    """

    def __init__(self, backbone: MaskedBackbone, own: nn.Module, head: nn.Module, masks: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.backbone, self.own, self.head = backbone, own, head
        self._masks = dict(masks)
        self._features = backbone.evaluation_with({masked: _times})

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, …)`` → logits ``(batch, classes)``."""
        logits: Tensor = self.head(self._features(self.backbone, x, self.own, self._masks))
        return logits


def _times(values: Any, mask: Tensor | None) -> Any:
    return values if mask is None else values * mask


class _Whole(fx.Tracer):
    """Leaves every module whole: the masked backbone's graph was traced as deep as need be."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def specialise(model: MaskedModel, task: int, head: nn.Module) -> tuple[TaskForward, fx.Graph]:
    """A copy of one task's forward, on the CPU, and its graph, in which masks are constants.

    Args:
        model: a masked model; not changed.
        task: a task with a kept mask.
        head: what its features go into.
    """
    like = next((p for p in model.backbone.parameters() if p.is_floating_point()), torch.empty(()))
    masks = model.by_layer(model.binary_mask(task).to("cpu", like.dtype))
    own = model.task_parts(task)
    assert own is not None
    forward = copy.deepcopy(TaskForward(model.backbone, own, head, masks)).cpu().eval()
    return forward, _Whole().trace(forward)
