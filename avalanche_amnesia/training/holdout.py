"""A share of a task's training data held out, to tell when its training was at its best."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.models import avalanche_forward
from torch import Tensor
from torch.utils.data import DataLoader

from avalanche_amnesia.models.task_labels import OneTask
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.plugins.in_memory_loader import TensorBatches


class Holdout:
    """The validation part of one task's training data."""

    def __init__(self, strategy: Strategy, share: float, seed: int, task: int) -> None:
        whole = strategy.adapted_dataset
        n = len(whole)
        held = min(max(1, round(share * n)), n - 1)
        generator = torch.Generator().manual_seed(derive_seed(seed, "validation", task))
        order = torch.randperm(n, generator=generator)
        self.out, self.rest = order[:held].sort().values, order[held:].sort().values
        self.dataset = whole.subset(self.out.tolist())
        self.n_whole = n
        strategy.adapted_dataset = whole.subset(self.rest.tolist())

    def in_memory(self, experience: Any) -> tuple[Tensor, Tensor] | None:
        """The task's tensors ``x``, ``y``, where the experience offers them."""
        tensors = getattr(experience, "tensors", None)
        return None if tensors is None or len(tensors[0]) != self.n_whole else tensors

    def replace_loader(self, strategy: Strategy, shuffle: bool, drop_last: bool) -> None:
        """Let the strategy train on whole mini-batches of the rest by indexing, where the data is in memory."""
        tensors = self.in_memory(strategy.experience)
        if tensors is not None:
            x, y = (tensor[self.rest].to(strategy.device) for tensor in tensors)
            strategy.dataloader = TensorBatches(
                x, y, int(strategy.experience.task_label), strategy.train_mb_size, shuffle=shuffle, drop_last=drop_last
            )

    @torch.no_grad()
    def score(self, strategy: Strategy) -> tuple[float, float]:
        """Accuracy and negative loss on the held out data, in evaluation mode: larger is better, in this order."""
        model, was = strategy.model, strategy.model.training
        model.eval()
        right, loss, n = 0, 0.0, 0
        for x, y, task in self._batches(strategy):
            logits = avalanche_forward(model, x, task)
            right += int((logits.argmax(1) == y).sum())
            loss += float(strategy._criterion(logits, y)) * len(y)
            n += len(y)
        model.train(was)
        return right / n, -loss / n

    def _batches(self, strategy: Strategy) -> Any:
        tensors = self.in_memory(strategy.experience)
        size = max(strategy.eval_mb_size, 1)
        if tensors is None:  # a generator of its own takes the draw that a loader makes for its workers
            loader = DataLoader(self.dataset.eval(), batch_size=size, generator=torch.Generator())
            return ([part.to(strategy.device) for part in batch] for batch in loader)
        x, y = (tensor[self.out].to(strategy.device) for tensor in tensors)
        task = OneTask(int(strategy.experience.task_label), y.device)
        return ((x[i : i + size], y[i : i + size], task.labels(len(x[i : i + size]))) for i in range(0, len(x), size))
