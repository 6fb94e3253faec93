"""Updates of chosen entries in few bits, from which the values before the task still come back exactly.

A task that is kept this way is *committed* to its coded update: its entries are set to ``before + Δ̂``, so that the
model, not its forgetting, carries the error. Undoing subtracts ``Δ̂`` in float64. Where ``before`` has lower bits than
``before + Δ̂`` can hold, this misses it by some units in the last place: how many is kept too, mostly 0.

The way back starts at the values that the task left: whatever else writes them must be recorded as a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from avalanche_amnesia.bits import as_integers, same_bits
from avalanche_amnesia.trajectory.sparse import SparseEntries, expand, pack, shrink

LEVELS = 127
"""int8 codes, and steps of the last place, run from −127 to 127."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
KEPT = -128
"""In the place of a number of steps: the value before is kept as it is."""


@dataclass(frozen=True)
class SparseUpdates(SparseEntries):
    """Coded updates of chosen entries of a tensor."""

    chosen: Tensor
    codes: Tensor
    scales: Tensor
    steps: Tensor
    values: Tensor
    shape: tuple[int, ...]
    follows_value = True

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Type of the tensor."""
        return self.values.dtype

    def before(self, written: Tensor) -> Tensor:
        """Values before the task: what it left minus the coded update, set right."""
        steps = self._steps
        old = (as_integers(self._subtracted(written)) + steps).view(self.dtype)
        old[steps == KEPT] = self.values
        return old

    def rebased(self, before: Tensor, written: Tensor) -> SparseUpdates:
        """The same codes, with corrections for the new values before."""
        missed = as_integers(before) - as_integers(self._subtracted(written))
        kept = (missed > LEVELS) | (missed < -LEVELS)
        steps = torch.where(kept, KEPT, missed).to(torch.int8)
        return SparseUpdates(self.chosen, self.codes, self.scales, _stored(steps), before[kept], self.shape)

    def extended(self, index: Tensor, values: Tensor) -> SparseUpdates:
        """The same with further entries, whose values before are kept as they are."""
        n, where = prod(self.shape), self.where.reshape(-1)
        codes, steps = torch.zeros(n, dtype=self.codes.dtype), torch.zeros(n, dtype=torch.int8)
        old = torch.zeros(n, dtype=self.dtype)
        codes[where], steps[where] = self.codes, self._steps
        old[steps == KEPT] = self.values
        where[index], steps[index], old[index] = True, KEPT, values
        kept = old[steps == KEPT]
        return SparseUpdates(pack(where), codes[where], self.scales, _stored(steps[where]), kept, self.shape)

    def restricted(self, keep: Tensor) -> SparseUpdates:
        """Some of the entries."""
        where, steps = self.where.reshape(-1), self._steps
        stays = keep[where]
        values = self.values[stays[steps == KEPT]]
        codes = self.codes[stays]
        return SparseUpdates(pack(where & keep), codes, self.scales, _stored(steps[stays]), values, self.shape)

    @property
    def _steps(self) -> Tensor:
        return torch.from_numpy(expand(self.steps, len(self.codes)).copy()).view(torch.int8)

    def _subtracted(self, written: Tensor) -> Tensor:
        index = self.where.reshape(-1).nonzero()[:, 0]
        return (written.double() - decode(self.codes, self.scales, index, self.shape)).to(self.dtype)


def _stored(steps: Tensor) -> Tensor:
    return shrink(steps.view(torch.uint8).numpy())


def coded(before: Tensor, after: Tensor, dtype: torch.dtype) -> tuple[Tensor, SparseUpdates]:
    """Commit a tensor to its coded update."""
    shape, n = tuple(before.shape), before.numel()
    old, new = before.reshape(-1), after.reshape(-1)
    delta = new.double() - old.double()
    everywhere = torch.arange(n)
    codes, scales = encode(delta, shape, dtype)
    update = decode(codes, scales, everywhere, shape)
    held = update.isfinite() & delta.isfinite()
    codes = torch.where(held, codes, torch.zeros_like(codes))
    committed = torch.where(held, (old.double() + update).to(old.dtype), new)
    committed = torch.where(same_bits(old, new), old, committed)
    moved = ~same_bits(old, committed)
    updates = SparseUpdates(pack(moved), codes[moved], scales, _stored(codes[:0].to(torch.int8)), old[:0], shape)
    return committed.reshape(shape), updates.rebased(old[moved], committed[moved])


def encode(delta: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes ``(n,)`` and scales of a flat float64 tensor."""
    if dtype is not torch.int8:
        return delta.to(dtype), torch.zeros(0, dtype=torch.bfloat16)
    rows = _rows(shape)
    finite = torch.where(delta.isfinite(), delta, 0.0).reshape(rows, -1)
    largest = finite.abs().amax(dim=1) if delta.numel() else torch.zeros(rows)
    scales = (largest / LEVELS).bfloat16()
    steps = finite / torch.where(scales > 0, scales, 1.0).double()[:, None]
    return steps.round().clamp(-LEVELS, LEVELS).to(torch.int8).reshape(-1), scales


def decode(codes: Tensor, scales: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Updates, float64, of the codes of the entries at flat ``index``."""
    if codes.dtype is not torch.int8:
        return codes.double()
    per_row = max(prod(shape) // _rows(shape), 1)
    return codes.double() * scales.double()[index // per_row]


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 and 0 not in shape else 1
