"""Task and class of samples whose task is not known, read from every task's head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.unit_graph.backbones import as_batch

InferenceRule = Literal["entropy", "confidence"]


class Prediction(NamedTuple):
    """Tasks and classes that were predicted for a batch.

    Attributes:
        tasks: label of the task whose head was read, per sample: int64 of shape ``(batch,)``.
        classes: its class with the largest logit, int64 of shape ``(batch,)``.
        certainty: in [0, 1], 0 where all classes are equally probable; shape ``(batch,)``.
    """

    tasks: Tensor
    classes: Tensor
    certainty: Tensor


class TaskInference:
    """Predicts samples without task labels: every task's head is read, and the most certain one is believed.

    The certainty of a head with ``C`` classes and softmax probabilities ``p`` is ``1 − H(p) / log C`` (``entropy``,
    the criterion by which SupSup chooses a mask), or ``(max p − 1/C) / (1 − 1/C)`` (``confidence``). Nothing is
    trained, and nothing is kept of a task: once it is unlearned, no sample is given to it. A batch costs one pass per
    task.

    Args:
        model: with a head for each task.
        rule: ``entropy`` or ``confidence``.

    Raises:
        TypeError: for another model.
        ValueError: for another rule.

    Reference: Wortsman et al., "Supermasks in Superposition", NeurIPS 2020, for the entropy.
    """

    def __init__(self, model: MultiHeadModel, rule: InferenceRule = "entropy") -> None:
        if not isinstance(model, MultiHeadModel):
            raise TypeError(
                f"a task is inferred from heads of tasks: give a MultiHeadModel, not {type(model).__name__}"
            )
        checks.one_of("rule", rule, InferenceRule)
        self.model, self.rule = model, rule

    @torch.no_grad()
    def __call__(self, x: Tensor | Mapping[str, Tensor], task: int | None = None) -> Prediction:
        """Predict a batch.

        Args:
            x: ``(batch, …)``, on the model's device; or several such tensors by the names of the backbone's arguments.
            task: label of all samples' task, where it is known; None: inferred for each sample.

        Raises:
            TypeError: if ``x`` is no batch.
            UnknownTaskError: if the task has no head.
            ValueError: if no task is left.
        """
        batch = as_batch(x)
        tasks = self.model.tasks if task is None else (task,)
        if not tasks:
            raise ValueError("the model has no task: none was trained, or all were unlearned")
        trains = self.model.training
        self.model.eval()
        try:
            read = [self._read(self.model(batch, label)) for label in tasks]
        finally:
            self.model.train(trains)
        certainty, chosen = torch.stack([certain for certain, _ in read]).max(0)
        classes = torch.stack([classes for _, classes in read])[chosen, torch.arange(len(batch), device=batch.device)]
        return Prediction(torch.tensor(tasks, device=batch.device)[chosen], classes, certainty)

    def _read(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Certainty and class of each sample. A head of one class is always certain: it counts as undecided."""
        n, p = logits.shape[1], logits.float().softmax(1)
        most, classes = p.max(1)
        if n == 1:
            return torch.zeros_like(most), classes
        if self.rule == "confidence":
            return (most - 1 / n) / (1 - 1 / n), classes
        return 1 - torch.special.entr(p).sum(1) / math.log(n), classes
