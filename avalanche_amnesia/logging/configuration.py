"""Configuration of a run for dashboards: the chosen settings and the values derived from these settings."""

from collections.abc import Mapping
from typing import Any

from avalanche_amnesia.audit.record import package_versions
from avalanche_amnesia.audit.words import tasks_in_words
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, own_settings, settings_of
from avalanche_amnesia.strategy import Strategy


def configuration_of(strategy: Strategy) -> dict[str, Any]:
    """Return a run's method, seed, stream, network, optimizer, training and plugin options and versions, by name.

    The stream, with its requests, is that of the current experience, else empty. Options that are off are left out.
    """
    model, optimizer = strategy.model, strategy.optimizer
    backbone = getattr(model, "backbone", model)
    seeding = next((plugin for plugin in strategy.plugins if getattr(plugin, "seeds_tasks", False)), None)
    learning = [p for p in strategy.plugins if p is not seeding and not isinstance(p, OF_THE_HOST)]
    found = settings_of(strategy, learning)
    training, of_optimizer = found.pop(type(strategy).__name__), found.pop(type(optimizer).__name__)
    seed = None if seeding is None else seeding.seed
    training = {name: value for name, value in training.items() if name not in ("optimizer", "seed")}
    options = {of: {n: v for n, v in own.items() if n != "seed"} for of, own in found.items()}
    order = {} if seeding is None else own_settings(seeding)
    return {
        "method": type(strategy).__name__,
        "seed": seed,
        **({"order_seed": order["order_seed"]} if order.get("order_seed", seed) != seed else {}),
        "stream": _stream_settings(strategy),
        "network": {
            "model": type(model).__name__,
            "backbone": getattr(backbone, "original", type(backbone).__name__),
            "parameters": sum(parameter.numel() for parameter in backbone.parameters()),
        },
        "optimizer": {"class": type(optimizer).__name__}
        | {n: v for n, v in of_optimizer.items() if v not in (None, False)},
        "training": _drop_empty(training),
        "options": _drop_empty(options),
        "versions": package_versions(),
    }


def _stream_settings(strategy: Strategy) -> dict[str, Any]:
    experience = getattr(strategy, "experience", None)
    stream = getattr(getattr(experience, "origin_stream", None), "benchmark", None)
    experiences = list(getattr(stream, "train_stream", ()))
    requests = [
        _request_text(request, experience.task_label)
        for experience in experiences
        for request in getattr(experience, "requests", ())
    ]
    permanent = [experience.task_label for experience in experiences if getattr(experience, "permanent", False)]
    deadline = next((each.deadline for each in experiences if getattr(each, "deadline", None) is not None), None)
    found = {"tasks": len(experiences), "requests": requests, "permanent": permanent, "deadline": deadline}
    return {name: value for name, value in found.items() if value not in (None, 0, [])}


def _request_text(request: Any, task: int) -> str:
    """Return a request to unlearn as text, with the number of samples but not their positions, which are private."""
    parts = [f"{len(request.samples)} samples"] if request.samples else []
    parts += [f"classes {', '.join(map(str, request.classes))}"] if request.classes else []
    what = f"{' and '.join(parts)} of task {request.tasks[0]}" if parts else tasks_in_words(request.tasks)
    return f"{what} {request.event(task)}"


def _drop_empty(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that are None and without empty groups."""
    found = {name: _drop_empty(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    return {name: value for name, value in found.items() if value is not None and value != {}}
