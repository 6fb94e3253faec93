"""Optimizers beside a strategy's own, of its class and settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


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


def bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """The optimizer's step without the profiling hooks around it, which cost more than the step of few numbers.

    To be called where no gradients are recorded.
    """
    return functools.partial(inspect.unwrap(type(optimizer).step), optimizer)
