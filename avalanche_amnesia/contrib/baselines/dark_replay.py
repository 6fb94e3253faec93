"""DER++ (dark experience replay): a memory of samples and logits of each task not unlearned, and its replay loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import single_task, task_data
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.saving.values import StateError, checked, create
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.backbones import in_batches
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.purgers import register_purger


@dataclass(frozen=True)
class Samples:
    """Stored samples of one task, in random order, so that the first ``n`` are a uniform sample for any ``n``."""

    x: Tensor
    y: Tensor
    logits: Tensor
    known: frozenset[int]

    def __len__(self) -> int:
        return len(self.y)

    def select(self, index: Tensor) -> Samples:
        """Return copies of the samples at the positions ``index``, ``(k,)``."""
        return Samples(self.x[index], self.y[index], self.logits[index], self.known)

    @property
    def has_logits(self) -> Tensor:
        """Return a bool mask ``(n,)``, True for samples with logits."""
        return ~self.logits.isnan().any(1)


class TaskMemory:
    """Memory with a uniform sample of each task's training data, on the CPU; the draw depends only on (seed, task)."""

    def __init__(self, memory_per_task: int, seed: int) -> None:
        self.memory_per_task = checks.whole_number("memory_per_task", memory_per_task)
        self.seed = checks.whole_number("seed", seed, None)
        self.samples: Mapping[int, Samples] = {}

    def store(self, model: MultiHeadModel, experience: Any, task: int, sources: Collection[int] | None = None) -> None:
        """Store random samples of a task and their logits, which depend on the tasks ``sources`` (None: all)."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "memory", task))
        index = torch.randperm(len(experience.dataset), generator=generator)[: self.memory_per_task]
        x, y = (part.clone() for part in task_data(experience, index))
        stored = Samples(x, y, _logits(model, x, task), frozenset(model.tasks if sources is None else sources))
        self.samples = {other: held for other, held in self.samples.items() if other != task} | {task: stored}

    def refresh_logits(self, model: MultiHeadModel, task: int, *, correct_only: bool = False) -> None:
        """Replace a task's stored logits by the current ones; ``correct_only``: NaN for misclassified samples."""
        held = self.samples[task]
        logits = _logits(model, held.x, task)
        if correct_only:
            logits[logits.argmax(1) != held.y] = torch.nan
        self.samples = {**self.samples, task: replace(held, logits=logits, known=frozenset(model.tasks))}

    def draw(self, tasks: Collection[int], n: int, generator: torch.Generator | None = None) -> dict[int, Samples]:
        """Draw at most ``n`` stored samples of ``tasks`` without replacement; return a dict of task to samples."""
        held = {task: samples for task, samples in self.samples.items() if task in tasks}
        of = torch.cat([torch.full((len(samples),), task) for task, samples in held.items()])
        within = torch.cat([torch.arange(len(samples)) for samples in held.values()])
        batch = torch.randperm(len(of), generator=generator)[:n]
        parts = {task: samples.select(within[batch[of[batch] == task]]) for task, samples in held.items()}
        return {task: part for task, part in parts.items() if len(part)}

    def state(self) -> dict[str, Any]:
        """Return the state to save: the samples, the maximum number per task, and the seed."""
        samples = {task: dict(vars(held)) for task, held in self.samples.items()}
        return {"memory_per_task": self.memory_per_task, "seed": self.seed, "samples": samples}

    def load_state(self, state: Any) -> None:
        """Load a saved :meth:`state`; raise StateError if its size or seed differs from that of this memory."""
        *saved, samples = checked(state, memory_per_task=int, seed=int, samples=dict)
        here = [self.memory_per_task, self.seed]
        if saved != here:
            raise StateError(f"a memory of (memory_per_task, seed) = {saved} was saved, and this one has {here}")
        self.samples = {task: create(Samples, held) for task, held in samples.items()}

    def forget(self, tasks: Collection[int], change: Transaction) -> int:
        """Delete samples of ``tasks`` and logits depending on them, undoable by ``change``; return how many samples."""
        change.keep(self, "samples")
        dropped = sum(len(samples) for task, samples in self.samples.items() if task in tasks)
        kept = {task: samples for task, samples in self.samples.items() if task not in tasks}
        for task, samples in kept.items():
            if not samples.known.isdisjoint(tasks):
                kept[task] = replace(samples, logits=torch.full_like(samples.logits, torch.nan))
        self.samples = kept
        return dropped


class MemoryPlugin(Plugin):
    """Base class of plugins whose only state is a memory of samples."""

    def __init__(self, memory: TaskMemory, loss: DarkLoss) -> None:
        super().__init__()
        self.memory, self.loss = memory, loss

    def state(self) -> Any:
        """Return the state to save: the samples."""
        return self.memory.state()

    def load_state(self, state: Any) -> None:
        """Load a saved state: the samples."""
        self.memory.load_state(state)


@dataclass(frozen=True)
class DarkLoss:
    """DER++'s loss on stored samples: squared error to their logits, and cross-entropy to their labels.

    If a sample has no logits, its cross-entropy gets the weight of the logits, too.

    Reference: Buzzega et al., Dark experience for general continual learning, NeurIPS 2020.
    """

    logit_weight: float
    label_weight: float

    def __post_init__(self) -> None:
        if min(self.logit_weight, self.label_weight) < 0 or self.logit_weight + self.label_weight <= 0:
            raise ValueError(
                "logits and labels in memory need weights of at least 0, and not both 0; got "
                f"logit_weight={self.logit_weight!r}, label_weight={self.label_weight!r}"
            )

    def __call__(self, model: MultiHeadModel, batch: Mapping[int, Samples]) -> Tensor:
        """Return the mean loss over a mini-batch (task → samples), with one forward pass per task."""
        device, total = next(model.parameters()).device, sum(len(samples) for samples in batch.values())
        parts = []
        for task, samples in batch.items():
            logits = model(samples.x.to(device), task)
            labels = F.cross_entropy(logits, samples.y.to(device), reduction="none")
            error = (logits - samples.logits.nan_to_num().to(device)).square().mean(1)
            dark = torch.where(samples.has_logits.to(device), error, labels)
            parts.append((self.logit_weight * dark + self.label_weight * labels).mean() * (len(samples) / total))
        return torch.stack(parts).sum()


def _logits(model: MultiHeadModel, x: Tensor, task: int) -> Tensor:
    return in_batches(model, x, lambda part: model(part, task))


class DarkReplayPlugin(MemoryPlugin):
    """Avalanche plugin that adds DER++'s loss on earlier tasks' samples to each step; turns ``Naive`` into DER++.

    Avalanche's own DER can't be used: it calls the model without task labels, but multi-head models need them.

    Args:
        memory_per_task: number of samples stored for each task, at least 1.
        batch_size: number of stored samples per step; by default the strategy's ``train_mb_size``.
        logit_weight: α, weight of the squared error to the stored logits.
        label_weight: β, weight of the cross-entropy to the stored labels.
        seed: the choice of samples derives from it and the task.

    Attributes:
        memory: the stored samples.

    Raises:
        ValueError: for an invalid value.

    Reference: Buzzega et al., Dark experience for general continual learning, NeurIPS 2020.
    """

    def __init__(
        self,
        *,
        memory_per_task: int = 50,
        batch_size: int | None = None,
        logit_weight: float = 0.5,
        label_weight: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(TaskMemory(memory_per_task, seed), DarkLoss(logit_weight, label_weight))
        self.batch_size = None if batch_size is None else checks.whole_number("batch_size", batch_size)

    def before_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the backward pass: add DER++'s loss on a mini-batch of stored samples."""
        if self.memory.samples:
            batch = self.memory.draw(self.memory.samples, self.batch_size or strategy.train_mb_size)
            strategy.loss = strategy.loss + self.loss(strategy.model, batch)

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: store samples of the task."""
        self.memory.store(strategy.model, strategy.experience, single_task(strategy.experience))


@register_purger(DarkReplayPlugin)
def _purge(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    return f"dark replay: {plugin.memory.forget(context.tasks, change)} samples of the tasks dropped, with their logits"
