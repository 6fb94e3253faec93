"""Interface of models with one mask per task, over units or over weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.modes import every_part
from avalanche_amnesia.models.multi_head import MultiHeadModel, UnknownTaskError


class MaskCover(Protocol):
    """Units or weights behind the entries of a mask, and the parameters that they cover."""

    @property
    def layers(self) -> Mapping[str, Any]:
        """The parts of a mask vector, by name, in its order."""

    def parameter_use(self, *masks: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Use of every parameter by some masks."""

    def reads(self, mask: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Parameter by parameter, which entries one mask covers: bool tensors that broadcast over the parameters."""

    def layer_of(self, parameter: str) -> int:
        """Index of the part of a mask that a parameter goes by, in :attr:`layers`."""


class TaskMasks(Mapping[int, Mapping[str, Tensor]]):
    """Binary masks of a model's trained tasks; each is made when it is asked for, as many ask for the labels alone."""

    def __init__(self, model: TaskMaskedModel) -> None:
        self._model = model

    def __getitem__(self, task: int) -> Mapping[str, Tensor]:
        if task not in self:
            raise KeyError(task)
        return self._model.by_layer(self._model.binary_mask(task))

    def __contains__(self, task: object) -> bool:
        return task in self._model.masked_tasks

    def __iter__(self) -> Iterator[int]:
        return iter(self._model.masked_tasks)

    def __len__(self) -> int:
        return len(self._model.masked_tasks)


class TaskMaskedModel(MultiHeadModel, ABC):
    """A multi-head model of which every task uses the part that its binary mask names.

    Base of :class:`MaskedModel` (masks over units) and :class:`SubnetModel` (masks over weights): what plans, records,
    adjustment, metrics and pictures read, so that they serve both.

    Attributes:
        graph: what the entries of a mask stand for.
        current_task: label of the task in training, None between tasks.
        generation: grows with every change of the set of masks.
        keeps_shared_entries: whether an entry that a forgotten task wrote, and a remaining task reads, stays as it is
            (the record lists it). False: the forgotten task's update is taken out of it.
    """

    graph: MaskCover
    current_task: int | None
    generation: int
    keeps_shared_entries: bool = False
    features_per_task = True
    state_per_task = True

    def entries_of(self, task: int) -> Iterator[tuple[str, Tensor]]:
        """Entries of the backbone that a task reads and may write: those that its mask covers.

        Args:
            task: with a mask; without one, as stock strategies train, it uses every entry.

        Returns:
            Full parameter name, bool tensor that broadcasts over the parameter.
        """
        try:
            mask = self.binary_mask(task)
        except UnknownTaskError:
            mask = torch.ones_like(self.cumulative_mask())
        return self.entries_under(mask)

    def entries_under(self, mask: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As :meth:`entries_of`, of any mask ``(n,)``."""
        for name, covered in self.graph.reads(self.by_layer(mask)):
            yield f"backbone.{name}", covered

    @abstractmethod
    def users_of(self, entries: Mapping[str, Tensor], tasks: Sequence[int]) -> frozenset[int]:
        """Tasks that read any of some entries: whose :meth:`entries_of` meet them.

        Args:
            entries: full parameter name → bool tensor of the parameter's shape; those outside the backbone, and those
                that no mask covers, count for none.
            tasks: with masks.
        """

    @property
    def frozen_in_use(self) -> frozenset[str]:
        """Names of the backbone's parameters that are frozen where they are in use, whatever the adjustment."""
        return frozenset()

    @property
    @abstractmethod
    def masked_tasks(self) -> tuple[int, ...]:
        """Tasks that have a mask, in the order in which they were trained."""

    @property
    def masks(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Binary masks of the trained tasks: task → part of the mask → bool tensor, one-dimensional, copied."""
        return TaskMasks(self)

    @abstractmethod
    def by_layer(self, vector: Tensor) -> Mapping[str, Tensor]:
        """A vector over a whole mask ``(…, n)`` cut into its parts."""

    @abstractmethod
    def binary_mask(self, task: int) -> Tensor:
        """A task's mask, bool ``(n,)``, copied."""

    @abstractmethod
    def cumulative_mask(self, tasks: Iterable[int] | None = None) -> Tensor:
        """Entries that any of some tasks uses, bool ``(n,)``: ``a^{≤t}``, rebuilt from the masks at every call.

        Args:
            tasks: with masks; None: every remaining task.
        """

    @abstractmethod
    def mask_name(self, task: int) -> str:
        """Name, in ``state_dict``, of the tensor that holds a task's mask."""

    def mask_bits(self) -> float | None:
        """Bits per weight and task that the masks take in ``compressed_state``; None where none is compressed."""
        return None

    def shared_state(self) -> list[str]:
        """Names of tensors that forwards changed, or began to keep, and that all tasks share; empty: there are none."""
        return []

    def set_trainable(self, task: int, learn: bool) -> None:
        """Let a task's own modules (its head) receive gradients, or not; drops those that they have."""
        own = [container._modules.get(str(task)) for container in self._containers]
        parts = [part for module in own if module is not None for part in every_part(module)]  # unnamed: of every task
        for parameter in [p for part in parts for p in part._parameters.values() if p is not None]:
            if parameter.requires_grad != learn:
                parameter.requires_grad_(learn)
            if parameter.grad is not None:
                parameter.grad = None

    @abstractmethod
    def finish_task(self) -> None:
        """Keep the mask of the task in training, which ends its training."""

    @abstractmethod
    def drop_current_task(self) -> None:
        """Give up the task in training, with everything that is its own."""

    def _check_same_training(self, state: Mapping[str, Any]) -> None:
        """Let a state from the middle of a task's training back into that training alone (early stopping does so)."""
        if self.current_task is None or state.keys() != self.state_dict().keys():
            now = "none is in training now" if self.current_task is None else f"in training is task {self.current_task}"
            raise ValueError(
                f"this state was saved in the middle of a task, and can be loaded in the same training alone; {now}: "
                "save between tasks"
            )

    def task_parts(self, task: int) -> nn.Module | None:
        """The task's own normalisation, on which its features depend besides its mask; None where it has none."""
        (held,) = self._containers[1:]
        return held[str(task)] if str(task) in held else None  # noqa: SIM401 - it has no get

    @abstractmethod
    def masked_features(self, x: Tensor, mask: Tensor, parts: nn.Module | None = None) -> Tensor:
        """Features ``(batch, features)`` through any mask.

        Args:
            x: ``(batch, …)``.
            mask: ``(n,)``.
            parts: a task's :meth:`task_parts`; None: as the backbone has them.
        """
