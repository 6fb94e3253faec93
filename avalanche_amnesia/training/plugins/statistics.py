"""Running statistics of a task's norms, taken again when its training is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models import TaskMaskedModel
from avalanche_amnesia.models.multi_head import single_task


class TaskStatistics:
    """The running statistics of one task's norms (BatchNorm), and the mini-batches that its network saw last.

    What training leaves behind lags behind the weights where it was short, and mixes the soft masks of every scale
    with hard ones. So the statistics are taken again from the last mini-batches: the very tensors that the network
    was given, after every transform and plugin.

    Args:
        model: in which the task is trained.
        task: its label; it has its norms already.
        n_batches: mini-batches to hold; 0, or a task without running statistics: none are held, nothing is changed.
    """

    def __init__(self, model: TaskMaskedModel, task: int, n_batches: int) -> None:
        self.model, self.task = model, task
        parts = model.task_parts(task)
        modules = [] if parts is None else parts.modules()
        self._norms: list[Any] = [norm for norm in modules if getattr(norm, "running_mean", None) is not None]
        self._seen: deque[Tensor] = deque(maxlen=n_batches if self._norms else 0)

    def see(self, x: Tensor, labels: Tensor) -> None:
        """Hold a mini-batch instead of the oldest one.

        Args:
            x: ``(batch, …)``.
            labels: task labels ``(batch,)``; other tasks' samples (replay) are left out.
        """
        if self._norms:
            self._seen.append(x if single_task(labels) == self.task else x[labels == self.task])

    @torch.no_grad()
    def retake(self) -> None:
        """Set each statistic to its plain average over the mini-batches, through the binary mask, without dropout.

        Mini-batches with fewer than two samples of the task have no variance and are passed over.
        """
        was, momenta = self.model.training, [norm.momentum for norm in self._norms]
        hooks = [norm.register_forward_pre_hook(_plain_average()) for norm in self._norms]
        self.model.eval()
        for norm in self._norms:
            norm.training = True
        for x in self._seen:
            if len(x) > 1:
                self.model.features(x, self.task)
        for norm, momentum, hook in zip(self._norms, momenta, hooks, strict=True):
            norm.momentum = momentum
            hook.remove()
        self.model.train(was)


def _plain_average() -> Callable[[nn.Module, Any], None]:
    """A hook that weighs the n-th call of a norm with 1/n: the first replaces what was there."""
    calls = 0

    def weigh(norm: Any, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        norm.momentum = 1 / calls

    return weigh
