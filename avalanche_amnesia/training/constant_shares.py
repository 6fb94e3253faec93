"""Shares of parameters that stay the same for all steps of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LONG = 32
"""Neighbours with a share in common from which on an expanded tensor is the faster one, as measured."""
_BLOCK = 2**17
"""Entries that are computed at a time: they stay in the processor's cache."""


class _RowsAndColumns(NamedTuple):
    """Shares ``min(rows, columns)`` of a matrix, ``(n, 1)`` and ``(1, m)``."""

    rows: Tensor
    columns: Tensor


class ConstantShares:
    """Shares of several parameters, in as little memory as they need.

    Those of a large matrix are mostly the least of one number per row and one per column: a block of rows at a time is
    computed from these, which takes as long as reading it would.

    Args:
        shares: one tensor per parameter, of its shape; best an expanded one where neighbours have one in common.
    """

    def __init__(self, shares: Sequence[Tensor]) -> None:
        self._shares = [_rows_and_columns(tensor) or tensor for tensor in shares]
        self._long_rows: list[Tensor | _RowsAndColumns] = []
        products = [shares for shares in self._shares if isinstance(shares, _RowsAndColumns)]
        self._room = products[0].rows.new_empty(_BLOCK) if products else None

    def dense(self) -> Iterator[Tensor]:
        """The shares, each of its parameter's shape, one after the other."""
        yield from (torch.minimum(*of) if isinstance(of, _RowsAndColumns) else of for of in self._shares)

    def take_off(self, gradients: Sequence[Tensor | None]) -> None:
        """``g ← g − g·share``, in place; where there is no gradient, nothing."""
        self._apply(_less, self._shares, [g if g is None else (g,) for g in gradients])

    def put_back(self, parameters: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """``θ ← lerp(θ, θ_before, share)``, in place."""
        if not self._long_rows:
            self._long_rows = [of if isinstance(of, _RowsAndColumns) else in_long_rows(of) for of in self._shares]
        self._apply(torch._foreach_lerp_, self._long_rows, list(zip(parameters, before, strict=True)))

    def _apply(
        self,
        work: Callable[..., object],
        shares: Sequence[Tensor | _RowsAndColumns],
        tensors: Sequence[tuple[Tensor, ...] | None],
    ) -> None:
        whole: list[tuple[Tensor, ...]] = []
        for of, given in zip(shares, tensors, strict=True):
            if given is None:
                continue
            if not isinstance(of, _RowsAndColumns):
                whole.append((*given, of))
                continue
            n = max(1, _BLOCK // of.columns.numel())
            for start in range(0, len(of.rows), n):
                rows = of.rows[start : start + n]
                assert self._room is not None
                room = self._room[: rows.numel() * of.columns.numel()].view(len(rows), -1)
                torch.minimum(rows, of.columns, out=room)
                work(*([tensor[start : start + n]] for tensor in given), [room])
        if whole:
            work(*map(list, zip(*whole, strict=True)))


def _less(gradients: list[Tensor], shares: list[Tensor]) -> None:
    torch._foreach_addcmul_(gradients, gradients, shares, value=-1)


def _rows_and_columns(shares: Tensor) -> _RowsAndColumns | None:
    """Numbers of rows and columns whose least these shares are; None where there are none, or it would save little."""
    if shares.dim() != 2 or 0 in shares.stride() or not shares.numel() > _BLOCK:
        return None
    if shares.device.type != "cpu" or shares.shape[1] > _BLOCK:
        return None  # on an accelerator every block would be a launch
    found = _RowsAndColumns(shares.amax(1, keepdim=True), shares.amax(0, keepdim=True))
    return found if torch.equal(torch.minimum(*found), shares) else None


def in_long_rows(shares: Tensor) -> Tensor:
    """The same shares, dense where few neighbours have one in common: an expanded tensor would cost more then."""
    in_common = 1
    for size, stride in zip(reversed(shares.shape), reversed(shares.stride()), strict=True):
        if stride:
            break
        in_common *= size
    return shares if in_common >= _LONG else shares.contiguous()
