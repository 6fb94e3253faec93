"""Compute the running statistics of a task's norms (BatchNorm) again when its training ends."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from avalanche_amnesia.models.multi_head import single_task
from avalanche_amnesia.processes import gathered, n_processes
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.unit_graph.backbones import evaluating

STATISTICS_BATCHES = 16
"""Number of mini-batches used to compute running statistics again."""


# Statistics of training lag after few steps, and mix the soft masks of every scale with hard ones. So statistics
# are computed again from the last inputs of the network, after transforms and plugins.
class TaskStatistics:
    """Norms (BatchNorm) that a task trains, and its last mini-batches, to compute their running statistics again."""

    def __init__(self, model: Any, task: int, n_batches: int) -> None:
        self.model, self.task = model, task
        self.norms = running_norms(model.task_parts(task) if getattr(model, "state_per_task", False) else model)
        self._seen: deque[Tensor] = deque(maxlen=n_batches)

    def see(self, strategy: Strategy) -> None:
        """Store the task's samples in a mini-batch; with ``n_batches`` stored ones, drop the oldest."""
        x, labels = strategy.mb_x, strategy.mb_task_id
        own = x if single_task(labels) == self.task else x[labels == self.task]
        self._seen.append(own if n_processes() == 1 or strategy.dataloader.samples else x[:0])

    def retake(self, norms: Sequence[Any], run: Callable[[Tensor], object]) -> None:
        """Compute running statistics of ``norms``; ``run`` passes a stored mini-batch through their network."""
        seen = [tree_map_only(Tensor, lambda rows: gathered(rows)[0], x) for x in self._seen]
        with evaluating(self.model):  # a mini-batch of one sample has no variance
            retake(norms, [x for x in seen if len(x) > 1], run)


def running_norms(parts: nn.Module | None) -> list[Any]:
    """Return the normalisation layers in ``parts`` (such as BatchNorm) that have running statistics."""
    modules = [] if parts is None else parts.modules()
    return [norm for norm in modules if getattr(norm, "running_mean", None) is not None]


def retake(norms: Sequence[Any], batches: Iterable[Tensor], run: Callable[[Tensor], object]) -> None:
    """Set each norm's running statistics to their plain average over ``batches``; ``run(batch)`` calls the network."""
    # Only the norms train: all else stays in evaluation mode, so that they see the inputs of testing. All of
    # them in one pass: a norm in training normalises by its batch, so later norms read no stale statistic.
    momenta = [norm.momentum for norm in norms]
    hooks = [norm.register_forward_pre_hook(partial(_average_plainly, count(1))) for norm in norms]
    for norm in norms:
        norm.training = True
    for x in batches:
        run(x)
    for norm, momentum, hook in zip(norms, momenta, hooks, strict=True):
        norm.momentum, norm.training = momentum, False
        hook.remove()


def _average_plainly(calls: Iterator[int], norm: Any, inputs: Any) -> None:
    """Set a norm's momentum to 1/n before its n-th call: a plain average, in which the old statistics do not count."""
    norm.momentum = 1 / next(calls)
