"""Stores of a model's per-task modules and tensors; those of finished tasks are hidden from torch, to save time.

If every task's modules stayed registered, each step, change of mode or copy of all parameters would become slower with
every task. So only modules that may still be trained are registered in torch. Those of finished tasks are in a plain
dictionary, but are still saved, loaded, moved and copied with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class TaskStore(nn.Module):
    """Base class of dict-like stores of one module or tensor per task label."""

    part: ClassVar[str]
    """Name of the ``nn.Module`` attribute where torch registers objects of this store."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {}
        self._in_sight: dict[str, Any] = vars(self)[self.part]

    def __getitem__(self, task: int | str) -> Any:
        return self.held[str(task)]

    def __contains__(self, task: int | str) -> bool:
        return str(task) in self.held

    def get(self, task: int | str, default: Any = None) -> Any:
        """Return a task's module or tensor, or a default if it has none."""
        return self.held.get(str(task), default)

    @property
    def tasks(self) -> tuple[int, ...]:
        """Return the labels of the tasks in the store, in the order of insertion."""
        return tuple(map(int, self.held))

    def drop(self, task: int) -> None:
        """Remove a task's module or tensor, if it has one."""
        self.held.pop(str(task), None)
        self._in_sight.pop(str(task), None)
        self._register(self._in_sight)

    def state(self) -> Any:
        """Return the store's contents for :meth:`restore`, as references, not copies."""
        return dict(self.held), dict(self._in_sight)

    def restore(self, state: Any) -> None:
        """Restore the store's contents that :meth:`state` returned."""
        held, in_sight = state
        self.held, self._in_sight = dict(held), dict(in_sight)
        self._register(self._in_sight)

    def _register(self, parts: dict[str, Any]) -> None:
        """Register exactly ``parts`` in torch. Done at every change, in case :func:`register_all` was interrupted."""
        vars(self)[self.part] = parts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the ``state_dict`` of all tasks, finished ones included."""
        with register_all(self):
            return super().state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TaskStore:
        with register_all(self):
            super()._apply(fn, recurse)
        return self


class TaskModules(TaskStore):
    """Store of one module per task label; ``parameters()`` includes only the modules of unfinished tasks."""

    part = "_modules"

    def __setitem__(self, task: int | str, module: nn.Module) -> None:
        self.held[str(task)] = self._in_sight[str(task)] = module
        self._register(self._in_sight)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Return the labels of the tasks that are not finished: ``parameters()`` includes their modules."""
        return tuple(map(int, self._in_sight))

    def finish(self, task: int) -> None:
        """Freeze a task's module, and hide it from ``parameters()``; the store still returns and saves it."""
        module = self._in_sight.pop(str(task), None)
        self._register(self._in_sight)
        if module is not None:
            module.eval().requires_grad_(False).zero_grad()

    def resume(self, task: int) -> None:
        """Register a finished task's module in torch again, so that it can be trained."""
        self._in_sight[str(task)] = self.held[str(task)].train(self.training)
        self._register(self._in_sight)


class TaskTensors(TaskStore):
    """Store of one tensor per task label, registered as a buffer in torch only inside a :func:`register_all` block."""

    part = "_buffers"

    def __setitem__(self, task: int | str, tensor: Tensor) -> None:
        self.held[str(task)] = tensor

    def match(self, state: Mapping[str, Tensor], prefix: str, device: torch.device) -> None:
        """Replace the contents by zeros with the names and shapes in ``state``, so that ``state`` can be loaded."""
        saved = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        self.held = {task: torch.zeros_like(value, device=device) for task, value in saved.items()}

    def reorder(self, tasks: Iterable[int]) -> None:
        """Sort the stored tensors in the order of ``tasks``; unlisted tasks come last."""
        places = {str(task): place for place, task in enumerate(tasks)}
        self.held = dict(sorted(self.held.items(), key=lambda item: places.get(item[0], len(places))))


@contextmanager
def register_all(model: nn.Module) -> Iterator[nn.Module]:
    """Let a model's ``parameters()`` and ``buffers()`` include those of finished tasks during a ``with`` block."""
    hidden = [(store, vars(store)[store.part]) for store in model.modules() if isinstance(store, TaskStore)]
    try:
        for store, _ in hidden:
            store._register(store.held)
        yield model
    finally:
        for store, in_sight in hidden:
            store._register(in_sight)


def finished_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict of name to parameter or buffer, for the modules of all finished tasks."""
    return {
        f"{path}.{task}.{name}": tensor
        for path, store in model.named_modules()
        if isinstance(store, TaskModules)
        for task, module in store.held.items()
        if int(task) not in store.unfinished
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
