"""The host strategy as a type: what this package uses of Avalanche's supervised template."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer


class Strategy(Protocol):
    """A supervised strategy of Avalanche, of this package or a stock one.

    Attributes:
        model: an ``nn.Module`` of any kind; each function says which it needs.
        optimizer: over the model's parameters.
        optimized_param_id: parameter name → parameter, as the optimizer has them; None before the first training.
        plugins: in the order in which events reach them.
        evaluator: Avalanche's ``EvaluationPlugin``.
        clock: Avalanche's counters of trainings, epochs and iterations.
        device: on which it trains.
        experience: the one in training, or in evaluation.
        adapted_dataset: of that experience.
        dataloader: of that experience.
        mbatch: parts of the mini-batch: inputs, labels, …, task labels.
        mb_x: inputs of the mini-batch.
        mb_y: labels of the mini-batch.
        mb_task_id: task labels of the mini-batch.
        mb_output: logits of the mini-batch.
        loss: of the mini-batch; a number between trainings.
        is_training: whether it trains; False in an evaluation.
        train_mb_size: samples of a mini-batch.
        train_epochs: epochs of a training.
        eval_mb_size: samples of a mini-batch in an evaluation.
        rollback_point: state to go back to while a task is being finished; None otherwise.
    """

    # Models are of several kinds, and Avalanche carries no annotations: these parts stay unchecked.
    model: Any
    optimizer: Optimizer
    optimized_param_id: dict[str, Any] | None
    plugins: list[Any]
    evaluator: Any
    clock: Any
    device: torch.device
    experience: Any
    adapted_dataset: Any
    dataloader: Any
    mbatch: Any
    mb_x: Any
    mb_y: Any
    mb_task_id: Any
    mb_output: Any
    loss: Any
    is_training: bool
    train_mb_size: int
    train_epochs: int
    eval_mb_size: int
    rollback_point: Any
    _criterion: Any

    def train(self, experiences: Any, eval_streams: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Train on experiences, one after the other."""

    def eval(self, exp_list: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on experiences; returns the last value of every metric."""
