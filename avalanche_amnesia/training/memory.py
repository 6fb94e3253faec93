"""A small episodic memory: some samples of every task with the logits that the model gave them (DER++)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models import MultiHeadModel
from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.seeding import derive_seed


@dataclass(frozen=True)
class Samples:
    """Samples of one task.

    Attributes:
        x: inputs ``(n, …)``.
        y: labels ``(n,)``.
        logits: that the model gave them when the task ended, ``(n, classes)``.
    """

    x: Tensor
    y: Tensor
    logits: Tensor


class EpisodicMemory:
    """The same number of samples for every task, drawn from (seed, task): what one task leaves depends on no other.

    Args:
        per_task: samples of each task, at least 1.
        logit_weight: of the squared error to the logits in memory (DER++'s α), at least 0.
        label_weight: of the cross-entropy to their labels (DER++'s β), at least 0.
        seed: the choice of samples derives from it and the task.

    Raises:
        ValueError: for a value that is not allowed.

    Reference: Buzzega et al., Dark experience for general continual learning, NeurIPS 2020.
    """

    def __init__(self, per_task: int, logit_weight: float, label_weight: float, seed: int) -> None:
        if not isinstance(per_task, int) or per_task < 1:
            raise ValueError(f"memory_per_task must be an int of at least 1, got {per_task!r}")
        for name, value in (("logit_weight", logit_weight), ("label_weight", label_weight)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value!r}")
        self.per_task, self.logit_weight, self.label_weight, self.seed = per_task, logit_weight, label_weight, seed
        self.samples: dict[int, Samples] = {}

    def keep(self, model: MultiHeadModel, experience: Any, task: int) -> None:
        """Keep some samples of a task that has just been trained."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "memory", task))
        index = torch.randperm(len(experience.dataset), generator=generator)[: self.per_task].sort().values
        x, y = (part.to(next(model.parameters()).device) for part in task_data(experience, index))
        with evaluating(model):
            self.samples[task] = Samples(x, y, model(x, task))

    def drop(self, tasks: Collection[int]) -> int:
        """Forget the samples of some tasks; returns how many there were."""
        gone = {task: of_task for task, of_task in self.samples.items() if task in tasks}
        self.samples = {task: of_task for task, of_task in self.samples.items() if task not in gone}
        return sum(len(of_task.y) for of_task in gone.values())

    def loss(
        self, model: MultiHeadModel, tasks: Collection[int], batch_size: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """DER++'s loss on a batch drawn from what is kept of some tasks: one forward pass per task in it.

        Args:
            model: in the mode that is wanted.
            tasks: those to draw from; at least one of them is kept.
            batch_size: samples, or all there are.
            generator: to draw with; None: torch's own stream.
        """
        chosen = {task: of_task for task, of_task in self.samples.items() if task in tasks}
        of = torch.cat([torch.full((len(of_task.y),), task) for task, of_task in chosen.items()])
        within = torch.cat([torch.arange(len(of_task.y)) for of_task in chosen.values()])
        batch = torch.randperm(len(of), generator=generator)[:batch_size]
        total: Tensor | None = None
        for task, of_task in chosen.items():
            rows = within[batch[of[batch] == task]].to(of_task.y.device)
            if not len(rows):
                continue
            logits = model(of_task.x[rows], task)
            dark = F.mse_loss(logits, of_task.logits[rows])
            labels = F.cross_entropy(logits, of_task.y[rows])
            part = (self.logit_weight * dark + self.label_weight * labels) * (len(rows) / len(batch))
            total = part if total is None else total + part
        assert total is not None
        return total
