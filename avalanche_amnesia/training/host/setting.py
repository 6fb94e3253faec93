"""What a training depends on beside seed, task and data: it must have been the same for every task to be repeatable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.object_walk import reachable
from avalanche_amnesia.unlearning.purging.learned_state import cleaned_anyway


class TrainingSettings:
    """The settings that tasks were trained at, and what the criterion held before the first of them."""

    def __init__(self) -> None:
        self._criterion: tuple[tuple[str, str], ...] | None = None
        self._first: tuple[object, ...] | None = None
        self._of: dict[int, tuple[object, ...]] = {}

    @property
    def unlike(self) -> frozenset[int]:
        """Tasks that were not trained at the settings of the first one."""
        return frozenset(task for task, setting in self._of.items() if setting != self._first)

    def prepare(self, strategy: Any) -> None:
        """Look at the criterion, before any task was trained."""
        if self._criterion is None:
            self._criterion = _criterion_state(strategy)

    def enter(self, strategy: Any, task: int) -> None:
        """Enter a task whose training takes its first step."""
        setting = self._of[task] = _setting(strategy)
        self._first = setting if self._first is None else self._first

    def leave(self, task: int | None, *, first: bool) -> None:
        """Drop a task that was given up.

        Args:
            task: its label; None: there is none.
            first: whether no task was trained before it: the next one is the first.
        """
        self._of.pop(task, None)  # type: ignore[arg-type]
        self._first = None if first else self._first

    def learned_criterion(self, strategy: Any) -> list[Any]:
        """The criterion, if it holds anything else by now than before the first training."""
        still = self._criterion is None or _criterion_state(strategy) == self._criterion
        return [] if still else [strategy._criterion]


def _criterion_state(strategy: Any) -> tuple[tuple[str, str], ...]:
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


def _setting(strategy: Any) -> tuple[object, ...]:
    """Settings of the optimizer, the criterion's state and the length of a training, as comparable values."""
    groups = [
        tuple((name, repr(value)) for name, value in sorted(group.items()) if name != "params")
        for group in strategy.optimizer.param_groups
    ]
    return tuple(groups), _criterion_state(strategy), strategy.train_mb_size, strategy.train_epochs
