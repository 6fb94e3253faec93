"""Probes: copies of an unlearned task's mask, head and norms, to measure how much of the task a model still has.

Probes are residue of the task. Only metrics store them, never the model, and only if the unlearning allows it
(``keep_probes``). Features of any multi-head model can be computed with a probe.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from avalanche.models import MultiHeadClassifier, avalanche_forward
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel, with_parts
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_norm import TaskNormModel
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.seeding import preserved_rng
from avalanche_amnesia.unit_graph.backbones import in_batches, run_backbone
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.task_owned import OwnModules

ProbeKind = Literal["own", "remaining", "none"]
"""Masks used to compute a task's features: the task's own mask, those of the remaining tasks, or none at all."""

_WITH_NORMS = (TaskMaskedModel, TaskNormModel)
"""Models whose heads contain norms. A head of another model may contain a whole network, which no probe needs."""


@dataclass(frozen=True)
class Probe:
    """Copies of an unlearned task's mask and head (normalisation layers included), to test the model on this task."""

    mask: Tensor | None  # None: the model has no masks
    head: nn.Module | None  # None: the model is no MultiHeadModel

    @property
    def parts(self) -> nn.Module | None:
        """Return the task's own backbone modules (such as norms), which its head contains; None without any."""
        return getattr(self.head, "own", None)

    def state(self) -> dict[str, Any]:
        """Return the probe's tensors, to save them: the copied mask, and the state dict of the copied head."""
        return {"mask": self.mask, "head": None if self.head is None else dict(self.head.state_dict())}

    @classmethod
    def from_state(cls, state: Any, model: Any) -> Probe:
        """Build a probe (copied mask and head) from tensors that :meth:`state` returned; ``model`` creates its head."""
        mask, tensors = checked(state, mask=Tensor | None, head=dict | None)
        if tensors is None:
            return cls(mask, None)
        with preserved_rng():
            with_norms = isinstance(model, _WITH_NORMS)
            head = model.head_for(tensors) if with_norms else model.new_head(len(tensors["weight"]))
        head.load_state_dict(tensors)
        return cls(mask, head.eval())


def copy_probe(model: nn.Module, task: int) -> Probe:
    """Return a probe: copies of a task's mask and its head with normalisation layers; None for a missing part."""
    mask = model.binary_mask(task) if isinstance(model, TaskMaskedModel) and task in model.masks else None
    if not isinstance(model, MultiHeadModel):
        return Probe(mask, None)
    head = model.head(task)
    return Probe(mask, deepcopy(head if isinstance(model, _WITH_NORMS) else with_parts(head, None)))


def features_of(
    model: nn.Module,
    x: Tensor,
    mask: Tensor | None = None,
    parts: nn.Module | None = None,
    task: int | None = None,
) -> Tensor:
    """Return the backbone's features ``(n, features)`` of inputs ``x``, ``(n, …)``, on the CPU.

    Args:
        model: a MultiHeadModel, or any model whose classifier is an Avalanche ``MultiHeadClassifier`` (the classifier's
            input counts as the features); ModelError for another model.
        mask: over the units or weights of a model with masks, ``(n,)``; None: no mask.
        parts: further modules of the task (``model.task_parts(task)``), for a model with masks or a TaskNormModel.
        task: task whose network to use, if the model has one per task; None: as for a task that the model lacks.
    """
    if parts is not None:
        parts = deepcopy(parts).to(next(model.parameters()).device).eval()
    return in_batches(model, x, lambda part: _batch_features(model, part, mask, parts, task))


def _batch_features(
    model: nn.Module, x: Tensor, mask: Tensor | None, parts: nn.Module | None, task: int | None
) -> Tensor:
    if isinstance(model, TaskMaskedModel):
        chosen = torch.ones_like(model.cumulative_mask()) if mask is None else mask.to(x.device)
        return model.masked_features(x, chosen, parts)
    if isinstance(model, TaskNormModel) and isinstance(parts, OwnModules):
        return model.features_through(x, parts)
    if isinstance(model, MultiHeadModel):
        return run_backbone(model.backbone, x) if task is None else model.features(x, task)
    classifier = next((m for m in model.modules() if isinstance(m, MultiHeadClassifier)), None)
    if classifier is None or not classifier.classifiers:
        raise ModelError(
            f"the features of {type(model).__name__} can't be found: use MultiHeadModel(backbone), or a model whose "
            "classifier is avalanche.models.MultiHeadClassifier with at least one head"
        )
    caught: list[Tensor] = []
    hook = classifier.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    try:
        some_task = int(next(iter(classifier.classifiers)))  # any one: without masks the features depend on no task
        avalanche_forward(model, x, torch.full((len(x),), some_task, device=x.device))
    finally:
        hook.remove()
    return caught[0]


def task_features(model: nn.Module, x: Tensor, task: int) -> Tensor:
    """Return the features ``(n, features)`` of inputs, through a task's mask and norms in the model, on the CPU."""
    if not isinstance(model, MultiHeadModel):
        return features_of(model, x, task=task)
    return in_batches(model, x, lambda part: model.features(part, task))
