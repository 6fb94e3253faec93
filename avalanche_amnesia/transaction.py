"""Changes that hold as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Transaction:
    """Changes inside a ``with`` block that are taken back, the last one first, unless :meth:`commit` was called.

    The way back is noted before each change is made, so that an interruption between the two does no harm.
    """

    def __init__(self) -> None:
        self._way_back = ExitStack()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._way_back.__exit__(kind, error, trace)

    def commit(self) -> None:
        """Let everything stay as it is now; there is no way back from here."""
        self._way_back.pop_all()

    def set(self, thing: object, **attributes: Any) -> None:
        """Set attributes of an object; those that it did not have go on the way back."""
        for name, value in attributes.items():
            if hasattr(thing, name):
                self._way_back.callback(setattr, thing, name, getattr(thing, name))
            else:
                self._way_back.callback(thing.__dict__.pop, name, None)
            setattr(thing, name, value)

    def keep(self, thing: object, *names: str) -> None:
        """Note attributes that are replaced later: the way back sets them to what they are now."""
        for name in names:
            self._way_back.callback(setattr, thing, name, getattr(thing, name))

    @torch.no_grad()
    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write values into a tensor, in place."""
        self._way_back.callback(_copy, tensor, tensor.detach().clone())
        tensor.copy_(values)

    def call(self, undo: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Note the way back of a change that is made next, by hand."""
        self._way_back.callback(undo, *args, **kwargs)


@torch.no_grad()
def _copy(tensor: Tensor, values: Tensor) -> None:
    tensor.copy_(values)
