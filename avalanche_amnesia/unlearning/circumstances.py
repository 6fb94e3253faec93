"""Settings and memories of a strategy as comparable values: circumstances of a training, which claims compare."""

from __future__ import annotations

from typing import Any

from avalanche_amnesia.object_walk import Parts, memory_of
from avalanche_amnesia.optimizer_traits import traits_of
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, learning_settings

Memory = tuple[tuple[str, str], ...]
"""Paths to numbers and tensors that an object holds, with their values or hashes."""

_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})


def training_settings(strategy: Any) -> dict[str, Any]:
    """Settings that a training depends on, as they are now: an optimizer's groups may differ from its defaults."""
    groups = strategy.optimizer.param_groups
    now = [{name: repr(value) for name, value in group.items() if name != "params"} for group in groups]
    learning = [plugin for plugin in strategy.plugins if not getattr(plugin, "answers_requests", False)]
    return {**learning_settings(strategy, learning), "parameter groups": now}


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
