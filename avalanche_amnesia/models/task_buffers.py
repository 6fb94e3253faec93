"""Tensors that belong to single tasks, kept so that they follow a model wherever it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class TaskBuffers(nn.Module):
    """One buffer per task: follows ``state_dict``, ``.to`` and ``deepcopy``."""

    def put(self, task: int, value: Tensor) -> None:
        """Set a task's tensor."""
        self._buffers.pop(str(task), None)
        self.register_buffer(str(task), value)

    def get(self, task: int) -> Tensor:
        """A task's tensor itself."""
        value = self._buffers[str(task)]
        assert value is not None
        return value

    def drop(self, task: int) -> None:
        """Take a task's tensor out, if it has one."""
        self._buffers.pop(str(task), None)

    def __contains__(self, task: int) -> bool:
        return str(task) in self._buffers

    @property
    def tasks(self) -> tuple[int, ...]:
        """Tasks that have a tensor, in the order in which they got it."""
        return tuple(int(name) for name in self._buffers)

    def reorder(self, tasks: Sequence[int]) -> None:
        """Take on an order of the tasks; those that it does not name go last."""
        places = {task: place for place, task in enumerate(tasks)}
        self._buffers = dict(sorted(self._buffers.items(), key=lambda item: places.get(int(item[0]), len(places))))

    def match(self, state: Mapping[str, Tensor], prefix: str, device: torch.device) -> None:
        """Take on the tasks and shapes of a saved state, ready to load it."""
        saved = {int(name.removeprefix(prefix)): value for name, value in state.items() if name.startswith(prefix)}
        for task in set(self.tasks) - set(saved):
            self.drop(task)
        for task, value in saved.items():
            self.put(task, torch.zeros_like(value, device=device))
