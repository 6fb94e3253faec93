"""Prediction of task and class for samples without task labels, from the certainty of every task's head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.unit_graph.backbones import as_batch, evaluation_mode

InferenceRule = Literal["entropy", "confidence"]


class Prediction(NamedTuple):
    """Predicted tasks and classes of a batch.

    Attributes:
        tasks: predicted task label of each sample, int64 ``(batch,)``.
        classes: class with the largest logit in that task's head, int64 ``(batch,)``.
        certainty: in [0, 1], 0 if all classes are equally probable; shape ``(batch,)``.
    """

    tasks: Tensor
    classes: Tensor
    certainty: Tensor


class TaskInference:
    """Classifier for samples without task labels: runs every task's head, and uses the most certain one.

    The certainty of a head with ``C`` classes and softmax probabilities ``p`` is ``1 − H(p) / log C`` (``entropy``,
    SupSup's criterion to choose a mask), or ``(max p − 1/C) / (1 − 1/C)`` (``confidence``). Nothing is trained, and
    no data of a task is stored, so an unlearned task is never predicted. A batch costs one forward pass per task.

    Args:
        model: a model with a head for each task.
        rule: ``entropy`` or ``confidence``.

    Raises:
        TypeError: if ``model`` is not a :class:`MultiHeadModel`.
        ValueError: for an unknown rule.

    Reference: Wortsman et al., "Supermasks in Superposition", NeurIPS 2020, for the entropy.
    """

    def __init__(self, model: MultiHeadModel, rule: InferenceRule = "entropy") -> None:
        if not isinstance(model, MultiHeadModel):
            raise TypeError(
                f"tasks are inferred from heads of tasks: give a MultiHeadModel, not {type(model).__name__}"
            )
        checks.one_of("rule", rule, InferenceRule)
        self.model, self.rule = model, rule

    def __call__(self, x: Tensor | Mapping[str, Tensor], task: int | None = None) -> Prediction:
        """Return the predicted task and class of each sample of a batch, and the certainty.

        Args:
            x: ``(batch, …)``, on the model's device; or a mapping of such tensors by the backbone's argument names.
            task: label of all samples' task, if known; None: inferred for each sample.

        Raises:
            TypeError: if ``x`` is no batch.
            UnknownTaskError: if the task has no head.
            ValueError: if the model has no task.
        """
        batch = as_batch(x)
        tasks = self.model.tasks if task is None else (task,)
        if not tasks:
            raise ValueError("the model has no task: none was trained, or all were unlearned")
        with evaluation_mode(self.model):
            read = [self.read(self.model(batch, label)) for label in tasks]
        certainty, chosen = torch.stack([certain for certain, _ in read]).max(0)
        classes = torch.stack([classes for _, classes in read])[chosen, torch.arange(len(batch), device=batch.device)]
        return Prediction(torch.tensor(tasks, device=batch.device)[chosen], classes, certainty)

    def read(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each sample's certainty and class from the logits of one head; certainty 0 for a head of one class."""
        n, p = logits.shape[1], logits.float().softmax(1)
        most, classes = p.max(1)
        if n == 1:
            return torch.zeros_like(most), classes
        if self.rule == "confidence":
            return (most - 1 / n) / (1 - 1 / n), classes
        return 1 - torch.special.entr(p).sum(1) / math.log(n), classes
