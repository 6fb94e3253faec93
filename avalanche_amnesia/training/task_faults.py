"""Faults of a task: its samples, its weights once it is trained, its accuracy, its mask; in words."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.seeding import preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.unit_graph.backbones import evaluating

_MOST_SAMPLES = 256
_NEAR_CHANCE = 0.1
"""Of the way from guessing the most frequent class to no error at all."""
_MOST_BYTES = 2**31
"""Of samples in memory: 20,000 large photographs would be twelve gigabytes."""
_FEW_SAMPLES = 64


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
        expected = model.graph.input_shape, model.graph.inputs.dtype
        if given == expected:
            return None
        made = f"{expected[0]}, {expected[1]}, for which this model was made"
        if given[0] != expected[0]:
            made += f", or make it with input_shape={given[0]}"
    return f"the model can't run on its samples of shape {given[0]}, {given[1]} ({error}); they need {made}"


def training_samples(strategy: Strategy, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples ``(n, …)`` of the task that a strategy has just trained, and their labels ``(n,)``."""
    experience = strategy.experience
    index = torch.randperm(len(experience.dataset), generator=torch.Generator().manual_seed(seed))[:most]
    of_one = task_data(experience, index[:1])[0].nbytes
    return task_data(experience, index[: max(1, _MOST_BYTES // of_one)].sort().values)


def what_diverged(model: TaskMaskedModel, task: int, experience: Any) -> str | None:
    """Reason, in words, why a task's network is of no use; None where all is well."""
    # Weights may be finite and absurd. Where features or logits overflow float32 when squared, every later task that
    # reads its units is lost too: losses are, variances and distances, and no head can be fitted. This task is to
    # blame.
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


def input_of(model: nn.Module, x: Tensor) -> Tensor:
    """Samples on a model's device, numbers in its type."""
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)


def _outputs(model: TaskMaskedModel, task: int, experience: Any) -> tuple[Tensor, Tensor]:
    with preserved_rng():
        x, _ = task_data(experience, torch.arange(min(_FEW_SAMPLES, len(experience.dataset))))
    with evaluating(model):
        features = model.features(input_of(model, x), task)
        return features, model.head(task)(features)


def unmoved(before: Mapping[str, Tensor], now: Mapping[str, Tensor], task: int) -> str | None:
    """Warning for a task that ends with the very weights, its head's included, with which it began."""
    if any(not torch.equal(value, before[name]) for name, value in now.items() if name in before):
        return None
    return (
        f"task {task} ends with the weights with which it began, those of its head too: what was trained was put "
        "back, or the learning rate is 0. EarlyStoppingPlugin goes back to the best value that it saw; the first that "
        "it sees in a task is the last one of the task before: give it a longer patience"
    )


class MaskWarning(RuntimeWarning):
    """A task's mask, or what it leaves for others, is probably not what was wanted; once each in a run."""


def near_chance(model: TaskMaskedModel, strategy: Strategy, task: int, seed: int) -> str | None:
    """Warning for a task whose training samples are classified hardly better than by its most frequent class."""
    try:
        with preserved_rng():
            x, labels = training_samples(strategy, _MOST_SAMPLES, seed)
        with evaluating(model):
            logits = torch.cat([model(part, task) for part in input_of(model, x).split(64)])
        hits = logits.argmax(1).cpu() == labels
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
    """Warning for layers that hold too little for the tasks to come, at what tasks have taken so far."""
    # Masks take less where less is free, so that a third of the need is thought enough.
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
