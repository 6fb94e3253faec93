"""The host strategy as a type: what this package uses of Avalanche's supervised template."""

from collections.abc import Sequence
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
