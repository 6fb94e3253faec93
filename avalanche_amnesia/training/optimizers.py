"""Optimizers beside a strategy's own, of its class and settings, and the numbers that optimizers remember."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FADING = 25
"""Steps between two looks for faint numbers."""
FAINT = 2.0**26
"""A number below so many times the smallest normal float is faint: halved FADING times it would still be normal."""


def sibling_optimizer(optimizer: Optimizer, parameters: Sequence[nn.Parameter], **changed: Any) -> Optimizer:
    """A new optimizer of the same class and settings, over other parameters.

    Args:
        optimizer: the strategy's.
        parameters: what the new one steps.
        changed: settings that differ; those that the class does not have are left out.
    """
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in {**optimizer.defaults, **changed}.items() if name in known}
    return type(optimizer)(parameters, **settings)


class BareStep:
    """An optimizer's step without the profiling hooks around it, which cost more than the step of few numbers.

    To be called where no gradients are recorded; clears faint numbers by itself.

    Args:
        optimizer: over any parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self._step = inspect.unwrap(type(optimizer).step)

    def __call__(self) -> None:
        self._step(self.optimizer)
        self.steps += 1
        clear_faint(self.optimizer, self.steps)


@torch.no_grad()
def clear_faint(optimizer: Optimizer, step: int) -> None:
    """Set, every :data:`FADING` steps, what is :data:`FAINT` in parameters and in what is remembered of them to 0.

    Closed units get no gradient for most of an epoch. A momentum of 0.9 then falls below the smallest normal float
    within 800 steps and stays there for ever; under Adam with weight decay the parameter does so too. Common processors
    compute several times as slowly with such numbers. Every entry goes by itself, so that it does not matter where in a
    tensor a unit lies.

    Args:
        optimizer: any, right behind its step; parameters without a gradient are left alone, and of its state only
            tensors of their parameter's shape are looked at.
        step: how many came before within the task.
    """
    if step % FADING:
        return
    for parameter, state in optimizer.state.items():
        if parameter.grad is not None:
            for value in (parameter.data, *state.values()):
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    torch.ops.aten.hardshrink.out(value, FAINT * torch.finfo(value.dtype).tiny, out=value)
