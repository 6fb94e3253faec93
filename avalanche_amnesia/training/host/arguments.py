"""Checks of arguments that the host lets pass and fails at later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from avalanche.core import BasePlugin
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia import checks

PeriodicMode = Literal["experience", "epoch", "iteration"]


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Avalanche's options of a strategy, with whole numbers as Python's own."""
    result = dict(options)
    least = {"train_mb_size": 1, "train_epochs": 1, "eval_mb_size": 1, "eval_every": -1}
    for name in least.keys() & options.keys():
        if name != "eval_mb_size" or options[name] is not None:  # None: as for training
            result[name] = checks.whole_number(name, options[name], least[name])
    if "peval_mode" in options:
        checks.one_of("peval_mode", options["peval_mode"], PeriodicMode)
    return result


def checked_plugins(plugins: Sequence[Any] | None) -> list[Any]:
    """A strategy's further plugins as a list."""
    if plugins is None:
        return []
    if isinstance(plugins, str) or not isinstance(plugins, Iterable):
        raise TypeError(f"plugins must be a list of plugins, got {plugins!r}: plugins=[TrajectoryPlugin(), …]")
    given = list(plugins)
    for plugin in given:
        if isinstance(plugin, type) or not any(name.startswith(("before_", "after_")) for name in dir(plugin)):
            raise TypeError(f"plugins holds {plugin!r}, which is no plugin: plugins=[TrajectoryPlugin(), …]")
    return given


def checked_evaluator(evaluator: Any) -> EvaluationPlugin:
    """A strategy's evaluator, made where a function that makes one was given."""
    made = evaluator if isinstance(evaluator, BasePlugin) or not callable(evaluator) else evaluator()
    checks.instance("evaluator", made, EvaluationPlugin, "EvaluationPlugin(accuracy_metrics(stream=True), loggers=[…])")
    return made


def checked_criterion(criterion: Any) -> Callable[..., Any]:
    """A strategy's loss."""
    if isinstance(criterion, type) or not callable(criterion):
        raise TypeError(
            f"criterion must be a loss of logits and labels, got {criterion!r}: criterion=torch.nn.CrossEntropyLoss()"
        )
    result: Callable[..., Any] = criterion
    return result


def listed(experiences: Any, call: str) -> list[Any]:
    """One experience, or several, as a list."""
    if _is_experience(experiences):
        return [experiences]
    way_out = "give an experience, or a stream or list of them, such as benchmark.train_stream"
    if hasattr(experiences, "streams"):
        streams = ", ".join(f"{name}_stream" for name in experiences.streams)
        raise TypeError(f"{call} takes experiences, got a benchmark: give one of its streams, {streams}")
    if isinstance(experiences, str) or not isinstance(experiences, Iterable):
        raise TypeError(f"{call} takes experiences, got {experiences!r}: {way_out}")
    given = list(experiences)
    for position, experience in enumerate(given):
        if not _is_experience(experience):
            raise TypeError(f"{call} takes experiences, and number {position} is {experience!r}: {way_out}")
    return given


def _is_experience(thing: object) -> bool:
    return hasattr(thing, "dataset") and hasattr(thing, "origin_stream")
