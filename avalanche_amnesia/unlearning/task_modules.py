"""The parts of a model that belong to one task alone, and how to take them out."""

from typing import Any

from avalanche.models import MultiHeadClassifier
from torch import nn

from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.weight_masks.forward_state import kept_tensors
from avalanche_amnesia.transaction import Transaction


def own_parameters(model: nn.Module, *tasks: int) -> frozenset[str]:
    """Names of the parameters that belong to these tasks alone (their heads, their normalisation)."""
    return frozenset(
        f"{name}{container}.{task}.{inner}"
        for name, module in _shared_modules(model)
        for container in _containers(module)
        for task in tasks
        if str(task) in (held := getattr(module, container))
        for inner, _ in held[str(task)].named_parameters()
    )


def _shared_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that no task has of its own, each with the prefix of its parts' names; however many tasks there are."""
    found = [("", model)]
    for prefix, module in found:  # which grows meanwhile
        containers = _containers(module)
        inner = [(name, part) for name, part in module._modules.items() if part is not None and name not in containers]
        found += [(f"{prefix}{name}.", part) for name, part in inner]
    return found


def _containers(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, MultiHeadModel):
        return module.task_containers
    return ("classifiers",) if isinstance(module, MultiHeadClassifier) else ()


def shared_statistics(model: nn.Module) -> list[str]:
    """Names of the modules whose running statistics all tasks share."""
    if isinstance(model, MultiHeadModel) and model.features_per_task:
        return []  # those in its backbone never run for a task that can go: each task has copies of its own
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    ]


def shared_state(model: nn.Module) -> dict[str, str]:
    """Name → hash of every tensor beside its parameters that a model keeps for all tasks together."""
    if isinstance(model, MultiHeadModel) and model.state_per_task:
        return {}  # each task has its own of what changes, or it is refused
    own = model.buffer_names(model.tasks) if isinstance(model, MultiHeadModel) else ()
    return {name: digest for name, digest in kept_tensors(model).items() if name not in own}


def remove_task_modules(model: nn.Module, task: int, change: Transaction) -> None:
    """Take the task's heads, masks and embeddings out of a model of this package, or one of Avalanche's."""
    for _, module in _shared_modules(model):
        if isinstance(module, MultiHeadModel):
            change.call(module.restore_task_state, module.task_state())
            if task in module.tasks:
                module.remove_task(task)
        elif isinstance(module, MultiHeadClassifier):
            _remove_avalanche_head(module, task, change)
        elif hasattr(module, "known_train_tasks_labels"):
            _forget_label(module, task, change)


def _remove_avalanche_head(module: MultiHeadClassifier, task: int, change: Transaction) -> None:
    _forget_label(module, task, change)
    change.set(module.classifiers, _modules=dict(module.classifiers._modules))
    change.set(module, _buffers=dict(module._buffers))
    if str(task) in module.classifiers:
        del module.classifiers[str(task)]
    module._buffers.pop(f"active_units_T{task}", None)


def _forget_label(module: Any, task: int, change: Transaction) -> None:
    change.set(module, known_train_tasks_labels=module.known_train_tasks_labels - {task})
