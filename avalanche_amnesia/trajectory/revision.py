"""Revisions: replacements for updates of remaining tasks, entered while a removal is worked out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Revision:
    """Replacement of a remaining task's update at some entries of a tensor: ``base · before + factor · own + added``.

    The task is recorded as having made the revised update: whatever is unlearned later, the task itself included, is
    taken out as if it had been so from the start.

    Attributes:
        where: bool tensor of the tensor's shape: the entries, ``k`` of them.
        factor: float64 ``(k,)``, or one number for all.
        added: float64 ``(k,)``, or one number for all.
        alone: whether what other remaining tasks wrote there, between those that go and this one, is dropped.
        base: float64 ``(k,)``, or one number for all: the share of the value before the task on which the update lies;
            0 where ``added`` is the value itself.
    """

    where: Tensor
    factor: Tensor | float = 1.0
    added: Tensor | float = 0.0
    alone: bool = False
    base: Tensor | float = 1.0

    @property
    def index(self) -> Tensor:
        """Flat positions of the entries, ``(k,)``."""
        return self.where.reshape(-1).nonzero()[:, 0]

    def written(self, before: Tensor, own: Tensor) -> Tensor:
        """Values after the revised task ``(k,)``, from those before it and its own update there, float64 ``(k,)``."""
        return before * self.base + (own * self.factor + self.added)


Revisions = Mapping[int, Mapping[str, Revision]]
"""Remaining task → tensor name → what its update becomes."""


def combined(several: Iterable[Revisions]) -> Revisions:
    """The revisions of several sources as one."""
    result: dict[int, dict[str, Revision]] = {}
    for revisions in several:
        for task, of_task in revisions.items():
            known = result.setdefault(task, {})
            twice = sorted(known.keys() & of_task.keys())
            if twice:
                raise ValueError(
                    f"two compensations revise what task {task} wrote into {twice}; give the strategy one of them alone"
                )
            known.update(of_task)
    return result


def dropped_entries(order: Iterable[int], revisions: Mapping[int, Revision]) -> dict[int, Tensor]:
    """Entries of one tensor at which each task's update gives way to a later one's that is to stand alone."""
    result: dict[int, Tensor] = {}
    later: Tensor | None = None
    for task in reversed(tuple(order)):
        if later is not None:
            result[task] = later
        if task in revisions and revisions[task].alone:
            where = revisions[task].where.reshape(-1)
            later = where if later is None else torch.logical_or(later, where)
    return result
