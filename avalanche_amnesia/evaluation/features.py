"""Features of any multi-head model on a task's data, through any mask."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from avalanche.models import MultiHeadClassifier, avalanche_forward
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_norm import TaskNormModel
from avalanche_amnesia.unit_graph.backbones import evaluating, run_on
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.task_owned import OwnModules


def features_of(
    model: nn.Module,
    x: Tensor,
    mask: Tensor | None = None,
    batch_size: int = 512,
    parts: nn.Module | None = None,
    task: int | None = None,
) -> Tensor:
    """Backbone features of inputs.

    Args:
        model: a MaskedModel, a SubnetModel, a MultiHeadModel, or any model whose classifier is an Avalanche
            ``MultiHeadClassifier`` (its input is taken for the features).
        x: ``(n, …)``.
        mask: over all units of a MaskedModel ``(n_units,)``, or weights of a SubnetModel ``(n_weights,)``; None: no
            mask, as for models without masks.
        batch_size: samples at a time.
        parts: what else a task's features depend on (``model.task_parts(task)``, used only with a mask; a
            TaskNormModel's ``task_norms(task)``).
        task: whose features, where a model has a network per task; None: those of a task that it does not have.

    Returns:
        ``(n, features)`` on the CPU.

    Raises:
        ModelError: if the model's features can't be found.
    """
    device = next(model.parameters()).device
    with evaluating(model):
        batches = x.split(batch_size)
        if parts is not None:
            parts = deepcopy(parts).to(device).eval()
        return torch.cat([_batch_features(model, part.to(device), mask, parts, task).cpu() for part in batches])


def _batch_features(
    model: nn.Module, x: Tensor, mask: Tensor | None, parts: nn.Module | None, task: int | None
) -> Tensor:
    if isinstance(model, TaskMaskedModel):
        chosen = torch.ones_like(model.cumulative_mask()) if mask is None else mask.to(x.device)
        return model.masked_features(x, chosen, parts)
    if isinstance(model, TaskNormModel) and isinstance(parts, OwnModules):
        return model.features_through(x, parts)
    if isinstance(model, MultiHeadModel):
        return run_on(model.backbone, x) if task is None else model.features(x, task)
    classifier = next((m for m in model.modules() if isinstance(m, MultiHeadClassifier)), None)
    if classifier is None or not classifier.classifiers:
        raise ModelError(
            f"the features of {type(model).__name__} can't be found: use MultiHeadModel(backbone), or a model whose "
            "classifier is avalanche.models.MultiHeadClassifier with at least one head"
        )
    caught: list[Tensor] = []
    hook = classifier.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    try:
        some_task = int(next(iter(classifier.classifiers)))  # without masks the features depend on no task
        avalanche_forward(model, x, torch.full((len(x),), some_task, device=x.device))
    finally:
        hook.remove()
    return caught[0]


def task_features(model: nn.Module, x: Tensor, task: int, batch_size: int = 512) -> Tensor:
    """As :func:`features_of`, as a task that the model has sees the inputs."""
    if not isinstance(model, MultiHeadModel):
        return features_of(model, x, batch_size=batch_size, task=task)
    device = next(model.parameters()).device
    with evaluating(model):
        return torch.cat([model.features(part.to(device), task).cpu() for part in x.split(batch_size)])


def mean_features(model: TaskMaskedModel, x: Tensor, tasks: Sequence[int]) -> Tensor:
    """Mean of the features as several tasks see them, ``(n, features)``: the probe ``remaining``."""
    seen = [features_of(model, x, model.binary_mask(task), parts=model.task_parts(task)) for task in tasks]
    return torch.stack(seen).mean(0)
