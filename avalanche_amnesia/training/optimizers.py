"""Further optimizers of the kind that the user chose."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


def optimizer_like(optimizer: Optimizer, parameters: Sequence[nn.Parameter], **changes: Any) -> Optimizer:
    """A new optimizer of the same class and settings.

    Args:
        optimizer: whose class and defaults are taken.
        parameters: what it steps.
        changes: settings that differ; those that the class does not know are passed over.
    """
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in {**optimizer.defaults, **changes}.items() if name in known}
    return type(optimizer)(list(parameters), **settings)
