"""Warnings about a task that has just been learned: its accuracy, its mask, and what it leaves for tasks to come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.seeding import preserved_rng
from avalanche_amnesia.training.task_samples import training_samples

_MOST_SAMPLES = 256
_NEAR_CHANCE = 0.1
"""Of the way from guessing the most frequent class to no error at all."""


class MaskWarning(RuntimeWarning):
    """A task's mask, or what it leaves for others, is probably not what was wanted; once each in a run."""


def near_chance(model: TaskMaskedModel, strategy: Any, task: int, seed: int) -> str | None:
    """Warning for a task whose training samples are classified hardly better than by its most frequent class."""
    try:
        hits, labels = _hits(model, strategy, task, seed)
        guess = float(labels.bincount().max()) / len(labels)
    except Exception:  # samples that a plugin prepares, targets that are no classes: a check must lose no task
        return None
    accuracy = float(hits.double().mean())
    if accuracy > guess + _NEAR_CHANCE * (1 - guess) or guess == 1:
        return None
    return (
        f"task {task} ends with an accuracy of {accuracy:.3f} on its own training samples, where its most frequent "
        f"class alone makes {guess:.3f}: it has hardly learned. More epochs, another learning rate, or masks that open "
        "more"
    )


def _hits(model: TaskMaskedModel, strategy: Any, task: int, seed: int) -> tuple[Tensor, Tensor]:
    with preserved_rng():
        x, labels = training_samples(strategy, _MOST_SAMPLES, seed)
    like = next(p for p in model.parameters() if p.is_floating_point())
    x = x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)
    with evaluating(model):
        logits = torch.cat([model(part, task) for part in x.split(64)])
    return logits.argmax(1).cpu() == labels, labels


def closed_layers(task: int, mask: Mapping[str, Tensor], allowed: Mapping[str, Tensor], min_units: int) -> str | None:
    """Warning for layers that a mask has closed but for the units that it was not allowed to close."""
    least = {
        name: int(units.sum())
        for name, units in mask.items()
        if int(units.sum()) <= min_units < int(allowed[name].sum())
    }
    if not least:
        return None
    return (
        f"the mask of task {task} has closed layers {least} down to min_units={min_units}: little can get through "
        "them. Wider layers, a larger budget, or under a regulariser a smaller sparsity_weight or budget='even'"
    )


def whole_layers(task: int, mask: Mapping[str, Tensor], n_batches: int) -> str | None:
    """Warning for a mask that opens every unit although a regulariser should have closed some."""
    if not all(bool(units.all()) for units in mask.values()):
        return None
    return (
        f"the mask of task {task} opens every unit after {n_batches} mini-batches: nothing is left for tasks to come. "
        "Embeddings that begin at 1 (embedding_init='ones') close in long trainings alone: a larger embedding_lr or "
        "sparsity_weight, another embedding_init, or budget='even'"
    )


def full_layers(task: int, free: Mapping[str, Tensor], n_tasks: int, to_come: int, share: float | None) -> str | None:
    """Warning for layers that hold too little for the tasks to come, at what tasks have taken so far.

    Masks take less where less is free, so that a third of the need is thought enough.
    """
    short = {}
    for name, units in free.items():
        left, used = int(units.sum()), int((~units).sum())
        need = used / n_tasks * to_come / 3 if share is None else 1 / share
        if left < need:
            short[name] = f"{left} of {len(units)}"
    if not short:
        return None
    mend = (
        "Wider layers, or unlearning, give more"
        if share is not None
        else "A larger sparsity_weight closes more, budget='even' gives each task its share, wider layers hold more"
    )
    return (
        f"after task {task} layers have {', '.join(f'{name!r}: {units}' for name, units in short.items())} units free, "
        f"and {to_come} more tasks are to come. {mend}"
    )
