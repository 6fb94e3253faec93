"""Plugin that averages the weights over the last steps of a task's training."""

from typing import Any

import torch
from avalanche.models.utils import avalanche_forward
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import TaskError, single_task
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.training.norm_statistics import STATISTICS_BATCHES, TaskStatistics
from avalanche_amnesia.training.task_faults import warn_of_early_stop
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.purgers import register_purger


class AveragedWeights(Plugin):
    """Plugin that replaces the weights, at the end of a task's training, by their mean over the last steps.

    This happens after the last epoch: before masks are stored, heads are fitted and updates are recorded. Weights that
    do not change keep their bits, so records of unlearnings claim what they claim without the plugin. The running
    statistics of BatchNorm, unless frozen, are computed again from the last 16 mini-batches (HAT: by HAT's own
    settings; CLPU-DER++: of temporary tasks). A training that stops before its last epoch gets no mean, and warns.
    Works with any Avalanche strategy.

    Args:
        last: fraction of the task's steps whose weights are averaged, in ``(0, 1]``.

    Raises:
        ValueError: for an invalid value.
        TaskError: in a training, if the loader does not know its number of mini-batches.

    Reference: Izmailov et al., Averaging weights leads to wider optima and better generalization, UAI 2018.
    """

    def __init__(self, last: float = 0.3) -> None:
        super().__init__()
        checks.within("last", last, "(0, 1]")
        self.last = last
        self._reset()

    def _reset(self) -> None:
        self._steps = self._skipped = self._averaged = 0
        self._learning: list[nn.Parameter] = []
        self._mean: list[Tensor] = []
        self._statistics: TaskStatistics | None = None

    def undo_training(self, strategy: Strategy) -> None:
        """Drop the running mean of the weights, because the task's training is undone."""
        self._reset()

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's first step: compute when averaging starts, and find the layers with running statistics."""
        self._reset()
        try:
            n_steps = strategy.train_epochs * len(strategy.dataloader)
        except TypeError as error:
            raise TaskError(
                f"AveragedWeights(last={self.last}) needs the number of a task's mini-batches, and "
                f"{type(strategy.dataloader).__name__} has no __len__: give the loader one"
            ) from error
        self._skipped = min(int((1 - self.last) * n_steps + 1e-9), n_steps - 1)  # (1 - .9) * 10 is just below 1
        if not isinstance(strategy.model, MaskedModel):  # HATPlugin computes statistics itself, under the final mask
            self._statistics = TaskStatistics(strategy.model, single_task(strategy.experience), STATISTICS_BATCHES)

    def before_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the backward pass: store the mini-batch, if running statistics will be recomputed from it."""
        if self._statistics is not None and self._statistics.norms:
            self._statistics.see(strategy)

    @torch.no_grad()
    def after_training_iteration(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a step: add the weights to the mean, if the step is among the last steps to be averaged."""
        self._steps += 1
        if self._steps <= self._skipped:
            return
        if not self._mean:
            groups = strategy.optimizer.param_groups
            self._learning = [p for group in groups for p in group["params"] if p.requires_grad]
            self._mean = [p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self._learning]
        self._averaged += 1
        now = [p.to(mean.dtype) for p, mean in zip(self._learning, self._mean, strict=True)]
        torch._foreach_lerp_(self._mean, now, 1 / self._averaged)

    @torch.no_grad()
    def after_training_epoch(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the last epoch: set the weights to their mean, and recompute BatchNorm's running statistics."""
        if strategy.clock.train_exp_epochs + 1 < strategy.train_epochs or not self._mean:
            return
        for parameter, mean in zip(self._learning, self._mean, strict=True):
            parameter.copy_(torch.where(parameter == mean, parameter, mean))  # a mean of -0.0 is 0.0
        if self._statistics is not None:
            model, labels = strategy.model, torch.tensor([self._statistics.task], device=strategy.device)
            learning = [norm for norm in self._statistics.norms if norm.training]
            self._statistics.recompute(learning, lambda x: avalanche_forward(model, x, labels.expand(len(x))))
        self._reset()

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: warn if it stopped before its last epoch, and drop the running mean."""
        if self._steps:
            warn_of_early_stop(self, strategy)
        self._reset()


@register_purger(AveragedWeights)
def _restart_mean(plugin: AveragedWeights, context: UnlearningContext, change: Transaction) -> str:
    """After an unlearning, restart the mean of weights: it may contain unlearned tasks. Return a line to record."""
    if getattr(context.model, "isolates", False):
        return "AveragedWeights: its mean is of weights that no unlearned task has"
    change.set(plugin, _averaged=0, _learning=[], _mean=[])
    return "AveragedWeights: its mean, if a task was in training, began again"
