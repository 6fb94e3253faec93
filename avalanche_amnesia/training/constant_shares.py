"""Shares of parameters that stay the same for all steps of a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_LONG = 32
"""Neighbours with a share in common from which on an expanded tensor is the faster one, as measured."""
_BLOCK = 2**17
"""Entries that are computed at a time: they stay in the processor's cache."""


class _RowsAndColumns:
    """Shares ``min(rows, columns)`` of a matrix, computed by blocks of rows."""

    def __init__(self, rows: Tensor, columns: Tensor, room: Tensor) -> None:
        self.rows, self.columns = rows, columns
        self.per_block = max(1, len(room) // columns.numel())
        parts = rows.split(self.per_block)
        self._blocks = [(part, room[: len(part) * columns.numel()].view(len(part), -1)) for part in parts]

    def blocks(self) -> Iterator[Tensor]:
        """Shares of one block after the other; each only until the next one is computed."""
        for rows, room in self._blocks:
            yield torch.minimum(rows, self.columns, out=room)


class ConstantShares:
    """Shares of several parameters, in as little memory as they need.

    Those of a large matrix are mostly the least of one number per row and one per column: a block of rows at a time is
    computed from these, which takes about as long as reading it would.
    """

    def __init__(self, shares: Sequence[Tensor]) -> None:
        large = [tensor for tensor in shares if _is_large(tensor)]
        room = large[0].new_empty(_BLOCK) if large else torch.empty(0)
        self._shares = [_rows_and_columns(of, room) or of if _is_large(of) else of for of in shares]
        self._long_rows: list[Tensor | _RowsAndColumns] = []

    def dense(self) -> Iterator[Tensor]:
        """The shares, each of its parameter's shape, one after the other."""
        yield from (
            torch.minimum(of.rows, of.columns) if isinstance(of, _RowsAndColumns) else of for of in self._shares
        )

    def take_off(self, gradients: Sequence[Tensor | None]) -> None:
        """``g ← g − g·share``, in place; where there is no gradient, nothing."""
        whole, held = [], []
        for gradient, shares in zip(gradients, self._shares, strict=True):
            if gradient is None:
                continue
            if isinstance(shares, _RowsAndColumns):
                for part, share in zip(gradient.split(shares.per_block), shares.blocks(), strict=True):
                    part.addcmul_(part, share, value=-1)
            else:
                whole.append(gradient)
                held.append(shares)
        if whole:
            torch._foreach_addcmul_(whole, whole, held, value=-1)

    def put_back(self, parameters: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """``θ ← lerp(θ, θ_before, share)``, in place."""
        if not self._long_rows:
            self._long_rows = [of if isinstance(of, _RowsAndColumns) else in_long_rows(of) for of in self._shares]
        whole = []
        for parameter, old, shares in zip(parameters, before, self._long_rows, strict=True):
            if isinstance(shares, _RowsAndColumns):
                n = shares.per_block
                for part, start, share in zip(parameter.split(n), old.split(n), shares.blocks(), strict=True):
                    part.lerp_(start, share)
            else:
                whole.append((parameter, old, shares))
        if whole:
            torch._foreach_lerp_(*map(list, zip(*whole, strict=True)))


def _is_large(shares: Tensor) -> bool:
    """Tell whether it pays to keep a number per row and column: on an accelerator every block would be a launch."""
    return shares.dim() == 2 and 0 not in shares.stride() and shares.numel() > _BLOCK and shares.device.type == "cpu"


def _rows_and_columns(shares: Tensor, room: Tensor) -> _RowsAndColumns | None:
    """Numbers of rows and columns whose least these shares are; None where there are none."""
    if shares.dtype != room.dtype or shares.shape[1] > len(room):
        return None
    rows, columns = shares.amax(1, keepdim=True), shares.amax(0, keepdim=True)
    same = torch.equal(torch.minimum(rows, columns), shares)
    return _RowsAndColumns(rows, columns, room) if same else None


def in_long_rows(shares: Tensor) -> Tensor:
    """The same shares, dense where few neighbours have one in common: an expanded tensor would cost more then."""
    in_common = 1
    for size, stride in zip(reversed(shares.shape), reversed(shares.stride()), strict=True):
        if stride:
            break
        in_common *= size
    return shares if in_common >= _LONG else shares.contiguous()
