"""Divergence of a training, found before its task is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.seeding import preserved_rng

_SAMPLES = 64


def what_diverged(model: TaskMaskedModel, task: int, experience: Any) -> str | None:
    """Reason, in words, why a task's network is of no use; None where all is well.

    Weights may be finite and absurd. Where features or logits overflow float32 when squared, the task is as lost as
    with NaN, and so is every later one that reads its units: their losses are, variances and distances, and no head
    can be fitted to such features. The task is to blame that made them, not the later ones.
    """
    own = (parameter for module in model.task_modules(task) for parameter in module.parameters())
    touched = (*model.parameters(recurse=False), *model.backbone.parameters(), *own)  # other tasks' were put back
    if not all(bool(parameter.isfinite().all()) for parameter in touched):
        return "some of its weights are infinite or NaN"
    try:
        features, logits = _outputs(model, task, experience)
    except Exception:  # samples that a plugin prepares, say: a task that was trained must not be lost to a check
        return None
    for name, values in (("features", features), ("logits", logits)):
        if not bool(values.float().square().sum().isfinite()):
            return f"its weights are finite, and its {name} are not, or overflow float32 when squared"
    return None


def _outputs(model: TaskMaskedModel, task: int, experience: Any) -> tuple[Tensor, Tensor]:
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    with preserved_rng():
        x, _ = task_data(experience, torch.arange(min(_SAMPLES, len(experience.dataset))))
    x = x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)
    with evaluating(model):
        features = model.features(x, task)
        return features, model.head(task)(features)
