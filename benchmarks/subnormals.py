"""Subnormal numbers in the steps of a training, counted: processors compute several times as slowly with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from avalanche_amnesia.optimizers import BareStep


def count_subnormals(values: Iterable[Any]) -> int:
    """Number of entries, in the floating tensors among some values, below their type's smallest normal number."""
    tensors = [value.detach() for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return sum(int(((t != 0) & (t.abs() < torch.finfo(t.dtype).tiny)).sum()) for t in tensors)


class _EveryResult(TorchDispatchMode):
    """Counts in what any operation returns or writes: forward, backward, optimizers."""

    def __init__(self, left_out: torch.Size) -> None:
        super().__init__()
        self.left_out = left_out
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name:  # holds whatever lay in that memory before
            return result
        seen = tree_leaves((args, result) if func._schema.is_mutable else result)
        found = count_subnormals(t for t in seen if isinstance(t, Tensor) and t.shape != self.left_out)
        if found:
            self.found[str(func)] += found
        return result


class SubnormalWatch(SupervisedPlugin):
    """Looks at every operation of every n-th of some training iterations, and at what is left behind it.

    The gate's own arithmetic, one number per unit, is exact on purpose and left out; its embedding's gradient and
    moments are not.

    Args:
        every: n.
        of: whether an iteration of a strategy is one of those; by default each is.

    Attributes:
        steps: iterations that were looked at.
        found: operation, or what was left behind → subnormal numbers.
    """

    def __init__(self, every: int, of: Callable[[Any], bool] = lambda strategy: True) -> None:
        super().__init__()
        self.every, self.of, self.steps, self.seen = every, of, 0, 0
        self.found: Counter[str] = Counter()
        self._results: _EveryResult | None = None

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        if not self.of(strategy):
            return
        if self.seen % self.every == 0:
            self._results = _EveryResult(torch.Size([getattr(strategy.model, "n_units", -1)]))
            self._results.__enter__()
        self.seen += 1

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        if self._results is None:
            return
        self._results.__exit__(None, None, None)
        self.found += self._results.found
        self._results = None
        parameters = list(strategy.model.parameters())
        self.found["parameters"] += count_subnormals(parameters)
        self.found["gradients"] += count_subnormals(parameter.grad for parameter in parameters)
        for optimizer in optimizers_of(strategy):
            states = [value for state in optimizer.state.values() for value in state.values()]
            self.found[f"moments of {type(optimizer).__name__}"] += count_subnormals(states)
        self.steps += 1


def optimizers_of(strategy: Any) -> list[Optimizer]:
    """The strategy's optimizer, and those that its plugins have of their own."""
    own = [value.optimizer for p in strategy.plugins for value in vars(p).values() if isinstance(value, BareStep)]
    return [strategy.optimizer, *own]
