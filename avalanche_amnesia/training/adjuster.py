"""The one place where rules of how far a parameter may still move are enforced, around the optimizer's step.

In update space, ``θ ← lerp(θ_after, θ_before, held)``, which holds under every optimizer; or by the gradient: as
published, and where it comes to the same and costs less.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import methodcaller

import torch
from torch import Tensor, nn

from avalanche_amnesia.optimizers import flushed_below
from avalanche_amnesia.training.hat_formulas import LayerSparsity
from avalanche_amnesia.training.update_rules import AdjustmentRule, LayerOf, OfStep, TaskUse, stored


class Adjuster:
    """Applies a rule to a backbone around each optimizer step."""

    def __init__(
        self,
        rule: AdjustmentRule,
        use: TaskUse,
        *,
        parameters: Mapping[str, nn.Parameter],
        before: Mapping[str, Tensor],
        layer_of: LayerOf,
        zero_rests: bool = False,
        linear: bool = False,
    ) -> None:
        self.rule, self.use = rule, use
        # Where there is nothing to hold back, nothing is done: the first task pays nothing.
        self.names = [name for name in use.covered if self._may_hold(name)]
        self.parameters = [parameters[name] for name in self.names]
        self.needs_sparsity = rule.reads_sparsity and bool(self.names)
        self._layer_of = layer_of
        held = self._prepared([]) if rule.constant else []
        self._constant = ConstantShares(held) if rule.constant else None
        self._step_held: list[Tensor] = []
        self._divisors: list[Tensor] = []
        # A frozen entry never moves within the task, so the values at its start are the values before every step.
        self.frozen = rule.constant and all(bool(((h == 0) | (h == 1)).all()) for h in map(stored, held))
        self._start = {name: before[name] for name in self.names}
        comes_to_the_same = zero_rests and (self.frozen or linear) and self._all_rest(held)
        self.on_gradients = rule.space == "gradient" or comes_to_the_same

    @cached_property
    def _prepared(self) -> OfStep:
        return self.rule.prepared(self.use, self.names, self._layer_of)

    @cached_property
    def _prepared_divisors(self) -> OfStep:
        return self.rule.divisors(self.use, self.names, self._layer_of)

    @cached_property
    def _before(self) -> list[Tensor]:
        """Values before a step."""
        return list(self._start.values()) if self.frozen else [torch.empty_like(v) for v in self._start.values()]

    @property
    def _held(self) -> Iterable[Tensor]:
        return self._step_held if self._constant is None else self._constant.dense()

    def _all_rest(self, constant: Sequence[Tensor]) -> bool:
        """Return True if each frozen entry keeps its bits without a gradient: -0 becomes 0, denormals are flushed."""
        for held, before in zip(constant, self._start.values(), strict=False):  # a rule that varies freezes nothing
            rests = (before.abs() > flushed_below(before.dtype)) | ((before == 0) & ~before.signbit())
            if bool(((held == 1) & ~rests).any()):
                return False
        return True

    def _may_hold(self, name: str) -> bool:
        """Return True if the rule may protect an entry of the parameter."""
        parts = [self.use.covered[name], self.rule.expected_held(self.use, name)]
        return any(bool((stored(part) > 0).any()) for part in parts)

    def frozen_entries(self) -> dict[str, Tensor]:
        """Parameter → bool tensor of the entries that are held back as a whole; empty unless shares are 0 or 1."""
        return dict(zip(self.names, (stored(held) == 1 for held in self._held), strict=True)) if self.frozen else {}

    def before_step(self, sparsity: LayerSparsity) -> None:
        """Prepare, after the backward pass, for a step; ``sparsity`` is ``κ`` per layer (empty: not read)."""
        if not self.names:
            return
        if self.on_gradients:
            self._scale_gradients(sparsity)
            return
        if self._constant is None:
            self._step_held = self._prepared(sparsity)
            self._divisors = []
        if not self.frozen:
            torch._foreach_copy_(self._before, [parameter.data for parameter in self.parameters])

    def _scale_gradients(self, sparsity: LayerSparsity) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        if self._constant is not None:
            self._constant.take_off(gradients)
            return
        self._divisors = self._prepared_divisors(sparsity)
        pairs = zip(gradients, self._divisors, strict=True)
        reached = [(gradient, divisor) for gradient, divisor in pairs if gradient is not None]
        if reached:
            torch._foreach_div_(*map(list, zip(*reached, strict=True)))

    def after_step(self) -> None:
        """Undo the protected share of the optimizer's step (lerp is exact at 0 and at 1)."""
        if not self.names or self.on_gradients:
            return
        parameters = [parameter.data for parameter in self.parameters]
        if self._constant is not None:
            self._constant.put_back(parameters, self._before)
            return
        torch._foreach_lerp_(parameters, self._before, [in_long_rows(held) for held in self._step_held])


# Shares that stay the same for all steps of a task ------------------------------------------------------------------

_LONG = 32
"""Neighbours with a share in common from which on an expanded tensor is the faster one, as measured."""
_BLOCK = 2**17
"""Entries that are computed at a time: they stay in the processor's cache."""


class _RowsAndColumns:
    """Shares ``min(rows, columns)`` of a matrix, computed by blocks of rows."""

    def __init__(self, rows: Tensor, columns: Tensor, room: Tensor) -> None:
        self.rows, self.columns = rows, columns
        self._split = methodcaller("split", max(1, len(room) // columns.numel()))
        parts = self._split(rows)
        self._blocks = [(part, room[: len(part) * columns.numel()].view(len(part), -1)) for part in parts]

    def beside(self, *matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Blocks of matrices of this shape, each with its shares, which last until the next ones are computed."""
        parts = zip(*map(self._split, matrices), strict=True)
        for of, (rows, room) in zip(parts, self._blocks, strict=True):
            yield *of, torch.minimum(rows, self.columns, out=room)


# Those of a large matrix are mostly the least of one number per row and one per column: a block of rows at a time
# is computed from these, which takes about as long as reading it would.
class ConstantShares:
    """Shares of several parameters, in as little memory as they need."""

    def __init__(self, shares: Sequence[Tensor]) -> None:
        room = torch.empty(_BLOCK, dtype=shares[0].dtype if shares else None, device="cpu")
        self._shares = [_rows_and_columns(of, room) or of for of in shares]

    @cached_property
    def _long_rows(self) -> list[Tensor | _RowsAndColumns]:
        return [in_long_rows(of) if isinstance(of, Tensor) else of for of in self._shares]

    def dense(self) -> Iterator[Tensor]:
        """The shares, each of its parameter's shape, one after the other."""
        yield from (of if isinstance(of, Tensor) else torch.minimum(of.rows, of.columns) for of in self._shares)

    def take_off(self, gradients: Sequence[Tensor | None]) -> None:
        """``g ← g − g·share``, in place; where there is no gradient, nothing."""
        whole, held = [], []
        for gradient, shares in zip(gradients, self._shares, strict=True):
            if gradient is None:
                continue
            if isinstance(shares, Tensor):
                whole.append(gradient)
                held.append(shares)
            else:
                for part, share in shares.beside(gradient):
                    part.addcmul_(part, share, value=-1)
        if whole:
            torch._foreach_addcmul_(whole, whole, held, value=-1)

    def put_back(self, parameters: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """``θ ← lerp(θ, θ_before, share)``, in place."""
        whole = []
        for parameter, old, shares in zip(parameters, before, self._long_rows, strict=True):
            if isinstance(shares, Tensor):
                whole.append((parameter, old, shares))
            else:
                for part, start, share in shares.beside(parameter, old):
                    part.lerp_(start, share)
        if whole:
            torch._foreach_lerp_(*map(list, zip(*whole, strict=True)))


def _rows_and_columns(shares: Tensor, room: Tensor) -> _RowsAndColumns | None:
    """Numbers of rows and columns whose least these shares are; None where there are none, or they would not pay."""
    large = shares.dim() == 2 and 0 not in shares.stride() and shares.numel() > _BLOCK >= shares.shape[1]
    if not large or shares.dtype != room.dtype or shares.device != room.device:  # on an accelerator a block is a launch
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
