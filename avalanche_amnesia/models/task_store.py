"""Possessions of single tasks in a model: modules and tensors by label, out of torch's sight once a task is finished.

A step, a change of mode, an optimizer or a copy of all parameters would take longer with every task if each were made
of submodules for ever. So only what may still learn is a part of the model for torch. What a finished task has lies in
a plain dictionary. It is saved, loaded, moved and copied with the model all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class TaskStore(nn.Module):
    """Task label → what the task has; base of stores of modules and of tensors."""

    part: ClassVar[str]
    """Name of the dictionary of every module in which torch looks for such things."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {}
        self._in_sight: dict[str, Any] = vars(self)[self.part]

    def __getitem__(self, task: int | str) -> Any:
        return self.held[str(task)]

    def __contains__(self, task: int | str) -> bool:
        return str(task) in self.held

    def get(self, task: int | str, default: Any = None) -> Any:
        """A task's module or tensor, or a default where it has none."""
        return self.held.get(str(task), default)

    @property
    def tasks(self) -> tuple[int, ...]:
        """Labels, in the order in which they came."""
        return tuple(map(int, self.held))

    def drop(self, task: int) -> None:
        """Take out what a task has, if it has something."""
        self.held.pop(str(task), None)
        self._in_sight.pop(str(task), None)
        self._show(self._in_sight)

    def state(self) -> Any:
        """Everything it holds, for :meth:`restore`; copies no module and no tensor."""
        return dict(self.held), dict(self._in_sight)

    def restore(self, state: Any) -> None:
        """Go back to what :meth:`state` returned."""
        held, in_sight = state
        self.held, self._in_sight = dict(held), dict(in_sight)
        self._show(self._in_sight)

    def _show(self, parts: dict[str, Any]) -> None:
        """Let torch see these; every change of the store calls it, as :func:`whole` may have been interrupted."""
        vars(self)[self.part] = parts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module``'s, of all tasks."""
        with whole(self):
            return super().state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TaskStore:
        with whole(self):
            super()._apply(fn, recurse)
        return self


class TaskModules(TaskStore):
    """Task label → a module: part of the model until the task is finished."""

    part = "_modules"

    def __setitem__(self, task: int | str, module: nn.Module) -> None:
        self.held[str(task)] = self._in_sight[str(task)] = module
        self._show(self._in_sight)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Labels of the tasks whose modules are part of the model."""
        return tuple(map(int, self._in_sight))

    def finish(self, task: int) -> None:
        """Put a task's module aside: it learns no more, and torch sees it no more."""
        module = self._in_sight.pop(str(task), None)
        self._show(self._in_sight)
        if module is not None:
            module.eval().requires_grad_(False).zero_grad()

    def resume(self, task: int) -> None:
        """Make a task's module a part of the model again."""
        self._in_sight[str(task)] = self.held[str(task)].train(self.training)
        self._show(self._in_sight)


class TaskTensors(TaskStore):
    """Task label → a tensor."""

    part = "_buffers"

    def __setitem__(self, task: int | str, tensor: Tensor) -> None:
        self.held[str(task)] = tensor

    def match(self, state: Mapping[str, Tensor], prefix: str, device: torch.device) -> None:
        """Take on the tasks and shapes of a saved state, ready to load it."""
        saved = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        self.held = {task: torch.zeros_like(value, device=device) for task, value in saved.items()}

    def reorder(self, tasks: Iterable[int]) -> None:
        """Take on an order of the tasks; those that it does not name go last."""
        places = {str(task): place for place, task in enumerate(tasks)}
        self.held = dict(sorted(self.held.items(), key=lambda item: places.get(item[0], len(places))))


@contextmanager
def whole(model: nn.Module) -> Iterator[nn.Module]:
    """Let torch see what finished tasks have, for the length of a block: in it walks over a model leave nothing out."""
    hidden = [(store, vars(store)[store.part]) for store in model.modules() if isinstance(store, TaskStore)]
    try:
        for store, _ in hidden:
            store._show(store.held)
        yield model
    finally:
        for store, in_sight in hidden:
            store._show(in_sight)


def finished_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name → parameter or buffer, of every module that a finished task has of its own."""
    return {
        f"{path}.{task}.{name}": tensor
        for path, store in model.named_modules()
        if isinstance(store, TaskModules)
        for task, module in store.held.items()
        if int(task) not in store.unfinished
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


class Parts:
    """Modules, parameters and buffers of a model, listed when a module or tensor is first looked for among them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._listed: frozenset[int] | None = None

    def __contains__(self, thing: object) -> bool:
        if not isinstance(thing, (Tensor, nn.Module)):
            return False
        if self._listed is None:
            with whole(self._model) as model:
                self._listed = frozenset(map(id, (*model.modules(), *model.parameters(), *model.buffers())))
        return id(thing) in self._listed
