"""Changes that are made completely or undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Transaction:
    """Context manager that undoes its changes in reverse order unless :meth:`commit` is called.

    Each undo step is registered before its change, so an interruption between the two is safe. Undo steps can be
    repeated, so an interruption of the undoing is safe, too.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._undo:
                self._undo[-1]()
                self._undo.pop()
        except BaseException:  # an interruption of the undoing: its last step is repeated
            with ExitStack() as rest:
                for undo in self._undo:
                    rest.callback(undo)
            raise

    def commit(self) -> None:
        """Keep all changes; they can no longer be undone."""
        self._undo = []

    def set(self, thing: object, **attributes: Any) -> None:
        """Set attributes of an object; undoing deletes attributes that were new."""
        for name, value in attributes.items():
            if hasattr(thing, name):
                self._undo.append(partial(setattr, thing, name, getattr(thing, name)))
            else:
                self._undo.append(partial(thing.__dict__.pop, name, None))
            setattr(thing, name, value)

    def keep(self, thing: object, *names: str) -> None:
        """Register attributes that will be replaced; undoing restores their current values."""
        for name in names:
            self._undo.append(partial(setattr, thing, name, getattr(thing, name)))

    @torch.no_grad()
    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write values into a tensor, in place."""
        self._undo.append(partial(_copy, tensor, tensor.detach().clone()))
        tensor.copy_(values)

    def call(self, undo: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Register an undo step for a change that the caller makes next."""
        self._undo.append(partial(undo, *args, **kwargs))


@torch.no_grad()
def _copy(tensor: Tensor, values: Tensor) -> None:
    tensor.copy_(values)
