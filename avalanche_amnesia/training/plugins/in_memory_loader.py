"""Whole mini-batches by indexing, for tasks whose data is in memory: the same batches as the default loader, faster."""

from collections.abc import Iterator
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor

from avalanche_amnesia.models.multi_head import OneTask
from avalanche_amnesia.strategy import Strategy


# Draws from the global random stream what a ``DataLoader`` with a ``RandomSampler`` draws, in the same order, so
# that both give the same batches and leave the stream in the same state.
class TensorBatches:
    """Mini-batches ``[x, y, task labels]`` of tensors, all those of ``experience`` where that is not None."""

    experience: Any = None

    def __init__(self, x: Tensor, y: Tensor, task: int, batch_size: int, *, shuffle: bool, drop_last: bool) -> None:
        self.x, self.y, self.task = x, y, OneTask(task, y.device)
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self.x), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def samples_of(self, experience: Any) -> tuple[Tensor, Tensor] | None:
        """Inputs and labels, if they are all those of an experience: they need not be made again."""
        return (self.x, self.y) if experience is self.experience else None

    def __iter__(self) -> Iterator[list[Tensor]]:
        torch.empty((), dtype=torch.int64).random_()  # the loader's seed for its workers
        order = torch.arange(len(self.x))
        if self.shuffle:
            sampler_seed = int(torch.empty((), dtype=torch.int64).random_())
            order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(sampler_seed))
        order = order.to(self.x.device)
        for begin in range(0, self.batch_size * len(self), self.batch_size):
            batch = order[begin : begin + self.batch_size]  # one by one: a few mini-batches are soon there
            yield [self.x.index_select(0, batch), self.y.index_select(0, batch), self.task.labels(len(batch))]


class InMemoryLoaderPlugin(SupervisedPlugin):
    """Replaces the data loader where an experience offers its data as tensors; otherwise does nothing.

    Experiences of :mod:`avalanche_amnesia.benchmarks` do. Put it in front of plugins that set a loader themselves
    (Replay).
    """

    repeatable = True

    def before_training_exp(
        self, strategy: Strategy, shuffle: bool = True, drop_last: bool = False, **kwargs: Any
    ) -> None:
        """Set the training loader, unless a loader with workers was asked for."""
        self._replace(strategy, strategy.train_mb_size, shuffle, drop_last, kwargs)

    def before_eval_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Set the evaluation loader."""
        self._replace(strategy, strategy.eval_mb_size, False, False, kwargs)

    def _replace(
        self, strategy: Strategy, batch_size: int, shuffle: bool, drop_last: bool, options: dict[str, Any]
    ) -> None:
        tensors = getattr(strategy.experience, "tensors", None)
        if tensors is None or len(strategy.adapted_dataset) != len(tensors[0]) or options.get("num_workers", 0):
            return
        x, y = (tensor.to(strategy.device) for tensor in tensors)
        task = int(strategy.experience.task_label)
        strategy.dataloader = TensorBatches(x, y, task, batch_size, shuffle=shuffle, drop_last=drop_last)
        strategy.dataloader.experience = strategy.experience
