"""Counting of subnormal numbers in training steps, because CPUs compute several times more slowly with them."""

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
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin


def count_subnormals(values: Iterable[Any]) -> int:
    """Return the number of subnormal entries in the floating-point tensors among ``values``."""
    tensors = [value.detach() for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return sum(int(((t != 0) & (t.abs() < torch.finfo(t.dtype).tiny)).sum()) for t in tensors)


class _EveryResult(TorchDispatchMode):
    """Dispatch mode that counts subnormal numbers in the results of all operations: forward, backward, optimizers."""

    def __init__(self, left_out: torch.Size) -> None:
        super().__init__()
        self.left_out = left_out
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name:  # the tensor's values are uninitialised memory
            return result
        seen = tree_leaves((args, result) if func._schema.is_mutable else result)
        found = count_subnormals(t for t in seen if isinstance(t, Tensor) and t.shape != self.left_out)
        if found:
            self.found[str(func)] += found
        return result


class SubnormalWatch(SupervisedPlugin):
    """Plugin that counts subnormal numbers in some training iterations: in all operations, and in the state after them.

    The gate's own operations, with one number per unit, are not counted, because subnormal numbers are intended there.
    The gradient and the moments of its embedding are counted.

    Args:
        every: count in every ``every``-th iteration.
        of: function of the strategy; returns True if the current iteration may be counted. Default: always.

    Attributes:
        steps: number of iterations with counts.
        found: operation, or kind of state (parameters, gradients, moments) → number of subnormal numbers.
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
    """Return the strategy's optimizer, and all optimizers of the task that its plugins train."""
    tasks = [plugin.in_training for plugin in strategy.plugins if isinstance(plugin, TaskMaskPlugin)]
    own = [value.optimizer for task in tasks for value in vars(task).values() if isinstance(value, BareStep)]
    return [strategy.optimizer, *own]
