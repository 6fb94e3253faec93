"""A few samples of every remaining task, and nothing of any other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models import TaskMaskedModel
from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.seeding import derive_seed


@dataclass(frozen=True)
class Samples:
    """Of one task, in the order in which they were drawn: any first part of them is a uniform sample too.

    Attributes:
        x: ``(n, …)``.
        y: ``(n,)``.
        logits: what the model gave when they were stored, or :meth:`TaskMemory.renew` was called, ``(n, classes)``;
            None once a task that the model knew then is gone, as they would bring some of it back.
        known: the tasks that the model knew then.
    """

    x: Tensor
    y: Tensor
    logits: Tensor | None
    known: frozenset[int]

    def __len__(self) -> int:
        return len(self.y)

    def first(self, n: int) -> Samples:
        """At most ``n`` of them, in storage of their own."""
        if n >= len(self):
            return self
        logits = None if self.logits is None else self.logits[:n].clone()
        return Samples(self.x[:n].clone(), self.y[:n].clone(), logits, self.known)

    def at(self, index: Tensor) -> Samples:
        """Those at some positions."""
        logits = None if self.logits is None else self.logits[index]
        return Samples(self.x[index], self.y[index], logits, self.known)


class TaskMemory:
    """A reservoir per task: a uniform sample of its training data, drawn from (seed, task), on the CPU.

    Args:
        samples_per_task: so many are held of each task, at least 1.
        size: of all tasks together instead, in equal parts: those of earlier tasks shrink as tasks come.
        seed: every draw derives from it and the task.

    Attributes:
        samples: task → :class:`Samples`; remaining tasks only.
    """

    def __init__(self, samples_per_task: int, size: int | None, seed: int) -> None:
        self.samples_per_task, self.size, self.seed = samples_per_task, size, seed
        self.samples: Mapping[int, Samples] = {}

    def store(self, model: TaskMaskedModel, experience: Any, task: int) -> None:
        """Draw samples of a task that has just been trained, with the logits that the model gives now."""
        others = {other: samples for other, samples in self.samples.items() if other != task}
        quota = self.samples_per_task if self.size is None else self.size // (len(others) + 1)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "memory", task))
        index = torch.randperm(len(experience.dataset), generator=generator)[:quota]
        x, y = (part.clone() for part in task_data(experience, index))
        stored = Samples(x, y, _logits(model, x, task), frozenset(model.tasks))
        self.samples = {other: samples.first(quota) for other, samples in others.items()} | {task: stored}

    def renew(self, model: TaskMaskedModel, task: int) -> None:
        """Store the logits that the model gives now in place of a task's older ones."""
        held = self.samples[task]
        renewed = replace(held, logits=_logits(model, held.x, task), known=frozenset(model.tasks))
        self.samples = {**self.samples, task: renewed}

    def forget(self, tasks: Collection[int], undo: ExitStack) -> int:
        """Drop everything of some tasks: their samples, and others' logits that a model gave which knew them.

        Args:
            tasks: that go.
            undo: receives the way back, from later changes too.

        Returns:
            The number of samples dropped.
        """
        undo.callback(setattr, self, "samples", self.samples)
        dropped = sum(len(samples) for task, samples in self.samples.items() if task in tasks)
        self.samples = {
            task: samples if samples.known.isdisjoint(tasks) else replace(samples, logits=None)
            for task, samples in self.samples.items()
            if task not in tasks
        }
        return dropped


def _logits(model: TaskMaskedModel, x: Tensor, task: int) -> Tensor:
    device = next(model.parameters()).device
    with evaluating(model):
        return torch.cat([model(part.to(device), task).cpu() for part in x.split(512)])
