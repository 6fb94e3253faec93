"""Fast data loader for tensors in memory: it yields the same mini-batches as Avalanche's loader, by indexing."""

from collections.abc import Iterator
from typing import Any

import torch
from avalanche.benchmarks.utils.data_loader import SingleDatasetDataLoader, TaskBalancedDataLoader
from avalanche.training.templates.base_sgd import BaseSGDTemplate
from torch import Tensor
from torch.utils._pytree import tree_leaves

from avalanche_amnesia.models.multi_head import OneTask
from avalanche_amnesia.strategy import Plugin, Strategy

_TRAINING = ("train_dataset_adaptation", "make_train_dataloader", "_obtain_common_dataloader_parameters")
_EVALUATION = ("eval_dataset_adaptation", "make_eval_dataloader", "_obtain_common_dataloader_parameters")


def has_default_loader(strategy: Strategy, training: bool) -> bool:
    """Return True if the strategy's loader was made by Avalanche's own methods, and no plugin has replaced it."""
    for name in _TRAINING if training else _EVALUATION:
        if getattr(getattr(strategy, name), "__func__", None) is not getattr(BaseSGDTemplate, name):
            return False
    kind, size = TaskBalancedDataLoader, strategy.train_mb_size
    if not training:
        kind, size = SingleDatasetDataLoader, strategy.eval_mb_size
    loader = strategy.dataloader
    if type(loader) is not kind or loader.batch_sizes != [size]:
        return False
    return sum(map(len, loader.datasets)) == len(strategy.adapted_dataset)


# Draws the same random numbers as a ``DataLoader`` with a ``RandomSampler``, in the same order. So both give the same
# mini-batches and leave the global random stream in the same state.
class TensorBatches:
    """Loader of mini-batches ``[x, y, task labels]``, made by indexing tensors.

    Attributes:
        experience: the experience if the tensors are all of its samples, otherwise None.
    """

    experience: Any = None

    def __init__(self, x: Tensor, y: Tensor, task: int, batch_size: int, *, shuffle: bool, drop_last: bool) -> None:
        self.x, self.y, self.task = x, y, OneTask(task, y.device)
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self.x), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def positions(self) -> list[Tensor]:
        """Draw the order of the samples; return the positions of each mini-batch's samples."""
        torch.empty((), dtype=torch.int64).random_()  # DataLoader draws the seed of its workers
        order = torch.arange(len(self.x))
        if self.shuffle:
            sampler_seed = int(torch.empty((), dtype=torch.int64).random_())
            order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(sampler_seed))
        return list(order.to(self.x.device).split(self.batch_size)[: len(self)])

    def batch_at(self, batch: Tensor) -> list[Tensor]:
        """Return the mini-batch of the samples at the positions ``batch``."""
        return [self.x.index_select(0, batch), self.y.index_select(0, batch), self.task.labels(len(batch))]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return map(self.batch_at, self.positions())  # one at a time, so that the first mini-batch comes at once


class NonEmptyBatches:
    """Wrapper of a loader that skips mini-batches without samples, which Poisson sampling draws."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # asked for by copies, which begin without attributes
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            sizes = [part.numel() for part in tree_leaves(batch) if isinstance(part, Tensor)]
            if any(sizes) or not sizes:
                yield batch


class InMemoryLoaderPlugin(Plugin):
    """Plugin that replaces Avalanche's data loader by a faster one, for experiences whose data are tensors in memory.

    Experiences of :mod:`avalanche_amnesia.benchmarks` offer their tensors. The mini-batches stay the same. A loader
    that a strategy's own methods or another plugin made stays, also one with workers. Place this plugin before
    plugins that set a loader (Replay).
    """

    def after_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Store the data set if no plugin has replaced it: only the experience's own data get the fast loader."""
        if strategy.adapted_dataset.targets is strategy.experience.dataset.targets:
            self._adapted = strategy.adapted_dataset

    after_eval_dataset_adaptation = after_train_dataset_adaptation

    def before_training_exp(
        self, strategy: Strategy, shuffle: bool = True, drop_last: bool = False, **kwargs: Any
    ) -> None:
        """Before a task's training: if data are tensors in memory, replace Avalanche's own loader by a faster one."""
        self._use_fast_loader(strategy, True, shuffle, drop_last, kwargs)

    def before_eval_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an evaluation: replace the evaluation loader if it is Avalanche's own."""
        self._use_fast_loader(strategy, False, False, False, kwargs)

    def _use_fast_loader(
        self, strategy: Strategy, training: bool, shuffle: bool, drop_last: bool, options: dict[str, Any]
    ) -> None:
        untouched = strategy.adapted_dataset is self.__dict__.pop("_adapted", None)  # else a plugin adapted the data
        experience: Any = strategy.experience
        tensors = getattr(experience, "tensors", None) if untouched and not options.get("num_workers", 0) else None
        if tensors is None or not has_default_loader(strategy, training):
            return
        x, y = (tensor.to(strategy.device) for tensor in tensors)
        size = strategy.train_mb_size if training else strategy.eval_mb_size
        batches = TensorBatches(x, y, int(experience.task_label), size, shuffle=shuffle, drop_last=drop_last)
        batches.experience, strategy.dataloader = experience, batches
