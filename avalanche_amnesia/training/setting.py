"""What a training depends on beside seed, task and data: it must have been the same for every task to be repeatable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.unlearning.purging import cleaned_anyway
from avalanche_amnesia.unlearning.reachable import reachable


def criterion_state(strategy: Any) -> tuple[tuple[str, str], ...]:
    """Path and value of every tensor and number that a strategy's criterion holds; tensors as hashes."""
    found: list[tuple[str, str]] = []
    beside = [strategy, strategy.optimizer, strategy.evaluator, *strategy.plugins, *cleaned_anyway(strategy.model)]
    for path, thing in reachable(strategy._criterion, "criterion", beside):
        if isinstance(thing, Tensor):
            found.append((path, tensor_hash(thing)))
        elif hasattr(thing, "__dict__") and not isinstance(thing, type):
            numbers = {name: value for name, value in vars(thing).items() if type(value) in (int, float)}
            found += [(f"{path}.{name}", repr(value)) for name, value in numbers.items()]
    return tuple(found)


def training_setting(strategy: Any) -> tuple[object, ...]:
    """Settings of the optimizer, the criterion's state and the length of a training, as comparable values."""
    groups = [
        tuple((name, repr(value)) for name, value in sorted(group.items()) if name != "params")
        for group in strategy.optimizer.param_groups
    ]
    return tuple(groups), criterion_state(strategy), strategy.train_mb_size, strategy.train_epochs
