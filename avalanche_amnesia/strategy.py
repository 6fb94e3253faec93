"""The host strategy as a type, what this package uses of Avalanche's supervised template; autocast around it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer


class Strategy(Protocol):
    """A supervised strategy of Avalanche, of this package or a stock one; attributes are documented there."""

    # Models are of several kinds, and Avalanche carries no annotations: these parts stay unchecked.
    model: Any
    optimizer: Optimizer
    optimized_param_id: dict[str, Any] | None  # parameter name → parameter, as the optimizer has them
    plugins: list[Any]
    evaluator: Any
    clock: Any
    device: torch.device
    experience: Any
    adapted_dataset: Any
    dataloader: Any
    mbatch: Any  # inputs, labels, …, task labels
    mb_x: Any
    mb_y: Any
    mb_task_id: Any
    mb_output: Any
    loss: Any
    is_training: bool
    train_mb_size: int
    train_epochs: int
    eval_mb_size: int
    rollback_point: Any  # where to go back to while a task is being finished; this package's
    _criterion: Any

    def train(self, experiences: Any, eval_streams: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Train on experiences, one after the other."""

    def training_epoch(self, **kwargs: Any) -> None:
        """Train on all mini-batches of the loader."""

    def eval(self, exp_list: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on experiences; returns the last value of every metric."""


Autocast = tuple[tuple[str, torch.dtype], ...]
"""Kinds of device, and the type to which autocast turns numbers there."""


def autocast_now() -> Autocast:
    """Kinds of device on which autocast is on."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def autocast(to: Autocast) -> Iterator[None]:
    """Autocast as given, and off everywhere else."""
    now = autocast_now()
    if to == now:
        yield
        return
    with ExitStack() as stack:
        for kind, _ in now:
            stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in to:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield
