"""Settings and memories of a strategy as comparable values: circumstances of a training, which claims compare."""

from __future__ import annotations

from typing import Any

from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates.base_sgd import PeriodicEval

from avalanche_amnesia.object_walk import Parts, memory_of
from avalanche_amnesia.optimizer_traits import traits_of

OF_THE_HOST = (EvaluationPlugin, PeriodicEval, Clock)
"""Avalanche's plugins that count and report, and take no part in a training."""

Memory = tuple[tuple[str, str], ...]
"""Paths to numbers and tensors that an object holds, with their values or hashes."""

_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})


def settings_of(strategy: Any) -> tuple[object, ...]:
    """Settings of the optimizer, the length of a training, and the plugins, which come last."""
    groups = tuple(
        tuple((name, repr(value)) for name, value in sorted(group.items()) if name != "params")
        for group in strategy.optimizer.param_groups
    )
    kind = type(strategy.optimizer).__name__
    return kind, groups, strategy.train_mb_size, strategy.train_epochs, plugin_classes(strategy)


def plugin_classes(strategy: Any) -> tuple[str, ...]:
    """Names of the classes of a strategy's plugins, in alphabetical order."""
    kinds = (type(plugin) for plugin in strategy.plugins if not isinstance(plugin, OF_THE_HOST))
    return tuple(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))


def criterion_memory(strategy: Any) -> Memory:
    """Numbers and tensors that a criterion holds."""
    skip = [strategy, strategy.optimizer, strategy.evaluator, *strategy.plugins]
    return memory_of(strategy._criterion, "criterion", skip, Parts(strategy.model))


def optimizer_memory(strategy: Any) -> Memory:
    """Numbers and tensors that an optimizer keeps beside its state, which a new task does not reset."""
    optimizer = strategy.optimizer
    if traits_of(optimizer).all_in_state:
        return ()
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_EVERY_OPTIMIZER}
    return memory_of(own, "optimizer", [strategy], Parts(strategy.model))
