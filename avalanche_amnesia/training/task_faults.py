"""Find faults of a task, in its samples, labels and trained weights, and describe them in error messages."""

import warnings
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from avalanche_amnesia.benchmarks.data import TensorTask, single_task, task_data
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.seeding import preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.plugins.in_memory_loader import TensorBatches
from avalanche_amnesia.unit_graph.backbones import NamedTensors, evaluation_mode, first_float

_MOST_BYTES = 2**31
"""Most bytes of samples drawn into memory: 20,000 large photographs would be twelve gigabytes."""
_FEW_SAMPLES = 32


def fault_of_inputs(x: Any) -> str | None:
    """Return a message that counts samples with NaN or infinity and names the first; None if all are finite."""
    for part in tree_leaves(x):
        if isinstance(part, Tensor) and part.is_floating_point() and not bool(part.isfinite().all()):
            return _non_finite_message((~part.reshape(len(part), -1).isfinite().all(1)).nonzero()[:, 0], len(part))
    return None


def fault_in_memory(samples: Any) -> str | None:
    """Return a message if samples stored as tensors contain NaN or infinity; None if not, or if stored otherwise."""
    in_memory = isinstance(samples, TensorTask) and samples.base.is_floating_point()
    where = samples.nonfinite_positions() if in_memory else torch.empty(0)
    return _non_finite_message(where, len(samples)) if len(where) else None


def _non_finite_message(where: Tensor, n: int) -> str:
    samples = f"{len(where)} of {n} samples hold" if len(where) > 1 else f"1 of {n} samples holds"
    return f"{samples} NaN or infinity, the first at index {int(where[0])}; take them out, or fill the gaps in"


def fault_of_labels(labels: Tensor, logits: Tensor, criterion: Any) -> str | None:
    """Return a message about labels that are no class numbers of the head, or about class weights; else None."""
    if not isinstance(criterion, nn.CrossEntropyLoss) or labels.dim() != 1:
        return None
    if labels.dtype not in (torch.int64, torch.uint8):
        return f"its labels are {labels.dtype}, and must be whole numbers, torch.int64: y.long()"
    taken = labels[labels != criterion.ignore_index]
    if not len(taken):
        return f"all {len(labels)} labels are {criterion.ignore_index}, which the loss ignores"
    lowest, highest = (int(label) for label in taken.aminmax())
    classes = logits.shape[1]
    weights = criterion.weight
    if weights is not None and len(weights) != classes:
        return (
            f"the loss has weights for {len(weights)} classes, and its head has {classes}: give a function "
            "instead, criterion=lambda logits, y: cross_entropy(logits, y, weights[logits.shape[1]])"
        )
    if lowest >= 0 and highest < classes:
        return None
    return (
        f"its labels lie in {lowest}..{highest}, and its head has {classes} classes, 0..{classes - 1}: count the "
        "labels of a task from 0, and let the experience's classes_in_this_experience name all of them"
    )


def fault_of_single(x: Any, model: Any, error: Exception) -> str | None:
    """Return a message if ``error`` arose because batch normalisation got a single sample; else None."""
    if len(x) != 1 or "more than 1 value per channel" not in str(error):
        return None
    norms = [(name, each) for name, each in model.backbone.named_modules() if isinstance(each, _BatchNorm)]
    which = ", ".join(f"{type(norm).__name__} {name!r}" for name, norm in norms[:1]) or "batch normalisation"
    return (
        f"one sample is alone in a mini-batch, by which {which} normalises: take another train_mb_size or "
        "eval_mb_size, strategy.train(…, drop_last=True), or a norm with running statistics"
    )


def fault_of_forward(x: Any, model: nn.Module, error: Exception, task_labels: Any) -> str | None:
    """Return a message about samples that the model can't process, or features that its heads can't read; else None."""
    if isinstance(error, torch.OutOfMemoryError):
        return None
    unlike = _wrong_features(x, model, task_labels)
    if unlike is not None:
        return unlike
    parts = tree_leaves(x)
    given = [(tuple(part.shape[1:]), part.dtype) for part in parts]
    backbone: Any = model.backbone
    weights = next((p.dtype for p in backbone.parameters() if p.is_floating_point()), torch.get_default_dtype())
    mend = "they need a backbone that takes them"
    if isinstance(model, MaskedModel):
        inputs = model.graph.inputs
        same_form = list(x) == list(inputs.names) if isinstance(x, NamedTensors) else not inputs.names
        if same_form and given == list(zip(inputs.shapes, inputs.dtypes, strict=True)):
            return None
        mend = f"they need {inputs.shape}, {inputs.dtype}, for which this model was made"
        if inputs.names:
            mend = f"they need tensors {list(inputs.names)}, for which this model was made"
        elif not isinstance(x, Tensor):
            mend += ", or make it with example=, a mapping of tensors"
        elif given[0][0] != inputs.shape:
            mend += f", or make it with input_shape={given[0][0]}{_shape_advice(given[0][0], inputs.shape)}"
    of_type = given[0][1]
    if of_type != weights and of_type in (torch.uint8, torch.float16, torch.float32, torch.float64):
        scale = " / 255" if of_type == torch.uint8 else ""
        mend += f". Its weights are {weights}: let the data set, or a transform of task_benchmark, return "
        mend += f"x.to({weights}){scale}"
        if of_type != torch.uint8:
            mend += f"; or compute as the samples are, with backbone.to({of_type})"
    shown = ", ".join(f"{shape}, {dtype}" for shape, dtype in given)
    names = "" if isinstance(x, Tensor) else f" by the names {list(x)}"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"the model can't run on its samples of shape {shown}{names} ({first_line}); {mend}"


def _shape_advice(given: tuple[int, ...], needed: tuple[int, ...]) -> str:
    """Return advice for an error message if the samples, permuted or reshaped, would fit; else an empty text."""
    if len(given) == 3 and given != needed and (given[2], *given[:2]) == needed:
        return "; channels come first, x.permute(0, 3, 1, 2)"
    return f"; they hold as many numbers, x.reshape(-1, *{needed})" if prod(given) == prod(needed) else ""


def _wrong_features(x: Any, model: Any, task_labels: Any) -> str | None:
    """Return a message if the features have a wrong shape for heads; None if the shape fits or the backbone fails."""
    try:
        with preserved_rng(), evaluation_mode(model):
            features = model.features(x, task_labels)
    except Exception:  # it does not run
        return None
    if isinstance(features, Tensor) and features.shape == (len(x), model.n_features):
        return None
    given = f"{tuple(features.shape)} {features.dtype}" if isinstance(features, Tensor) else type(features).__name__
    return (
        f"the backbone returns {given}, and a head reads ({len(x)}, {model.n_features}), samples and features: "
        "let it return one such tensor, and give the model n_features=, its width, where it takes that"
    )


def training_samples(strategy: Strategy, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return at most ``most`` random samples ``(n, …)`` of the task just trained, and their labels ``(n,)``."""
    return samples_at(strategy, drawn_positions(strategy, most, seed))


def drawn_positions(strategy: Strategy, most: int, seed: int) -> Tensor:
    """Return up to ``most`` random positions in the data of the task just trained, sorted; fewer, to fit in 2 GiB."""
    experience = strategy.experience
    index = torch.randperm(len(experience.dataset), generator=torch.Generator().manual_seed(seed))[:most]
    of_one = sum(part.nbytes for part in tree_leaves(task_data(experience, index[:1])[0]))
    return index[: max(1, _MOST_BYTES // of_one)].sort().values


def samples_at(strategy: Strategy, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the current task's samples at the positions ``index``, and their labels."""
    experience, loader = strategy.experience, strategy.dataloader
    if not isinstance(loader, TensorBatches) or loader.experience is not experience:
        return task_data(experience, index)
    x, y = loader.x, loader.y
    return (x, y) if len(index) == len(x) else (x[index], y[index])


def divergence_of(model: TaskMaskedModel, task: int, experience: Any) -> str | None:
    """Return why a trained task has diverged (weights not finite, features or logits overflow); None if it has not."""
    # Weights may be finite and still useless: if features or logits overflow float32 when squared, losses, variances
    # and fitted heads of every later task that reads these units fail too.
    own = model.heads[task].parameters()
    touched = (*model.parameters(recurse=False), *model.backbone.parameters(), *own)  # other tasks' were restored
    if not all(bool(parameter.isfinite().all()) for parameter in touched):
        return "some of its weights are infinite or NaN"
    try:
        with preserved_rng():
            x, _ = task_data(experience, torch.arange(min(_FEW_SAMPLES, len(experience.dataset))))
        with evaluation_mode(model):
            features = model.features(input_of(model, x), task)
            logits = model.head(task)(features)
    except Exception:  # for example samples prepared by a plugin: a check must not lose a trained task
        return None
    for name, values in (("features", features), ("logits", logits)):
        if not bool(values.float().square().sum().isfinite()):
            return f"its weights are finite, and its {name} are not, or overflow float32 when squared"
    return None


def input_of(model: nn.Module, x: Any) -> Any:
    """Return samples on the model's device; floating-point samples get the model's dtype."""
    like = first_float(model)
    return tree_map(lambda part: part.to(like.device, like.dtype if part.is_floating_point() else part.dtype), x)


def unchanged_warning(before: Mapping[str, Tensor], model: MultiHeadModel, task: int) -> str | None:
    """Return a warning if the training changed neither the shared weights nor the task's head; else None."""
    now = dict(model.named_parameters())
    if any(not torch.equal(value, before[name]) for name, value in now.items() if name in before):
        return None
    if getattr(model.head(task), "out_features", None) == 1:
        return f"task {task} has one class, and nothing was learned (its accuracy is 1): give it two classes or more"
    return (
        f"task {task} ends with the weights with which it began: the learning rate is 0, or a plugin put them back, as "
        "EarlyStoppingPlugin does from the last value of the task before: give it a longer patience"
    )


class MaskWarning(RuntimeWarning):
    """Warning that a task was not trained, or its head could not be fitted; each kind is emitted once in a run."""


def warn_of_early_stop(plugin: object, strategy: Strategy) -> None:
    """Warn that a plugin did nothing for a task, because the training stopped before its last epoch."""
    task, epochs = single_task(strategy.experience), f"{strategy.clock.train_exp_epochs} of {strategy.train_epochs}"
    text = f"{type(plugin).__name__} did nothing for task {task}, as its training stopped after {epochs} epochs"
    warnings.warn(f"{text}: leave it out, or what stops trainings", stacklevel=2)
