"""Transaction: a group of changes to objects and tensors that is undone unless it is committed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Transaction:
    """Context manager that undoes all changes made through it, in reverse order, unless :meth:`commit` is called.

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
        """Make all changes so far final: the end of the ``with`` block no longer undoes them."""
        self._undo = []

    def set(self, obj: object, **attributes: Any) -> None:
        """Set attributes of ``obj``; undoing restores their old values, and deletes attributes that were new."""
        for name, value in attributes.items():
            if hasattr(obj, name):
                self._undo.append(partial(setattr, obj, name, getattr(obj, name)))
            else:
                self._undo.append(partial(obj.__dict__.pop, name, None))
            setattr(obj, name, value)

    def keep(self, obj: object, *names: str) -> None:
        """Store the current values of attributes that the caller will replace; undoing restores the values."""
        for name in names:
            self._undo.append(partial(setattr, obj, name, getattr(obj, name)))

    @torch.no_grad()
    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Copy ``values`` into a tensor, in place; undoing restores the tensor's old values."""
        self._undo.append(partial(torch.no_grad()(tensor.copy_), tensor.detach().clone()))
        tensor.copy_(values)

    def call(self, undo: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Register an undo step, ``undo(*args, **kwargs)``, for a change that the caller makes next."""
        self._undo.append(partial(undo, *args, **kwargs))
