"""Type of Avalanche's supervised strategies, with the attributes that this package uses, and helpers for autocast."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from avalanche.core import SupervisedPlugin
from torch.optim import Optimizer


class Plugin(SupervisedPlugin):
    """Base class of this package's plugins, declared fit for distributed training, so that Avalanche does not warn."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(supports_distributed=True, **kwargs)


class Strategy(Protocol):
    """Type of a supervised strategy from Avalanche or this package; Avalanche documents the attributes."""

    # ``Any`` because there are several kinds of models and Avalanche has no annotations.
    model: Any
    optimizer: Optimizer
    optimized_param_id: dict[str, Any] | None  # name → parameter in the optimizer
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
    rollback_point: Any  # set by this package: state to restore if the end of a task's training fails
    _criterion: Any

    def train(self, experiences: Any, eval_streams: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Train on experiences, one after another."""

    def training_epoch(self, **kwargs: Any) -> None:
        """Train for one epoch, on all mini-batches of the data loader."""

    def eval(self, exp_list: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on experiences and return the last value of every metric."""


Autocast = tuple[tuple[str, torch.dtype], ...]
"""Pairs of a device type and the dtype that autocast uses there."""


def autocast_now() -> Autocast:
    """Return the device types with autocast enabled now, each with the dtype that autocast uses there."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def autocast(to: Autocast) -> Iterator[None]:
    """In a ``with`` block, enable autocast for the device types in ``to``, with their dtypes, and for no other."""
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
