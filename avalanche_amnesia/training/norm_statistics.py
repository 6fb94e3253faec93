"""Recompute the running statistics of a task's normalisation layers (BatchNorm) at the end of its training."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from avalanche_amnesia.models.multi_head import single_task
from avalanche_amnesia.processes import gather_rows, n_processes
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.unit_graph.backbones import evaluation_mode

STATISTICS_BATCHES = 16
"""Number of mini-batches used to compute running statistics again."""


# Running statistics from training lag after few steps, and mix soft masks of every scale. So they are computed again
# from the last inputs of the network, after transforms and plugins.
class TaskStatistics:
    """A task's normalisation layers and its last mini-batches, used to recompute the layers' running statistics."""

    def __init__(self, model: Any, task: int, n_batches: int) -> None:
        self.model, self.task = model, task
        self.norms = running_norms(model.task_parts(task) if getattr(model, "state_per_task", False) else model)
        self._seen: deque[Tensor] = deque(maxlen=n_batches)

    def see(self, strategy: Strategy) -> None:
        """Store the current mini-batch's samples of the task. Keep only the last ``n_batches`` mini-batches."""
        x, labels = strategy.mb_x, strategy.mb_task_id
        own = x if single_task(labels) == self.task else x[labels == self.task]
        self._seen.append(own if n_processes() == 1 or strategy.dataloader.samples else x[:0])

    def recompute(self, norms: Sequence[Any], run: Callable[[Tensor], object]) -> None:
        """Recompute the running statistics of ``norms``; ``run(x)`` must pass a mini-batch through the network."""
        seen = [tree_map_only(Tensor, lambda rows: gather_rows(rows)[0], x) for x in self._seen]
        with evaluation_mode(self.model):  # a mini-batch of one sample has no variance
            recompute(norms, [x for x in seen if len(x) > 1], run)


def running_norms(parts: nn.Module | None) -> list[Any]:
    """Return the normalisation layers in ``parts`` (such as BatchNorm) that have running statistics."""
    modules = [] if parts is None else parts.modules()
    return [norm for norm in modules if getattr(norm, "running_mean", None) is not None]


def recompute(norms: Sequence[Any], batches: Iterable[Tensor], run: Callable[[Tensor], object]) -> None:
    """Set the running statistics of ``norms`` to their average over ``batches``; ``run(x)`` must call the network."""
    # Only these layers are in training mode, so that they get the same inputs as in evaluation. One pass is enough: a
    # layer in training mode normalises by its batch, so no later layer depends on an old statistic.
    momenta = [norm.momentum for norm in norms]
    hooks = [norm.register_forward_pre_hook(partial(_use_plain_average, count(1))) for norm in norms]
    try:
        for norm in norms:
            norm.training = True
        for x in batches:
            run(x)
    finally:
        for norm, momentum, hook in zip(norms, momenta, hooks, strict=True):
            norm.momentum, norm.training = momentum, False
            hook.remove()


def _use_plain_average(calls: Iterator[int], norm: Any, inputs: Any) -> None:
    """Set a layer's momentum to 1/n before its n-th call. Running statistics then become plain averages."""
    norm.momentum = 1 / next(calls)
