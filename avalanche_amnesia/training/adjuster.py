"""Enforce an adjustment rule: limit how far the optimizer's step changes parameters that earlier tasks use.

In update space, ``θ ← lerp(θ_after, θ_before, share)``, which protects under every optimizer; or by scaled
gradients: as published, and for plain SGD, because the result is equal and costs less.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from avalanche_amnesia.training.hat_formulas import LayerSparsity
from avalanche_amnesia.training.update_rules import AdjustmentRule, LayerOf, TaskUse, stored


class Adjuster:
    """Applies an adjustment rule to a backbone's parameters before and after each optimizer step.

    Attributes:
        names: parameters that the rule may protect; empty in the first task, where nothing is done.
        frozen: True if every share is 0 or 1 and constant: the rule freezes some entries and frees the rest.
        on_gradients: True if gradients are scaled; False if updates are undone after the step.
    """

    def __init__(
        self,
        rule: AdjustmentRule,
        use: TaskUse,
        *,
        parameters: Mapping[str, nn.Parameter],
        before: Mapping[str, Tensor],
        layer_of: LayerOf,
        linear: bool = False,
    ) -> None:
        self.rule, self.use = rule, use
        self.names = [name for name in use.covered if self._may_protect(name)]
        self.parameters = [parameters[name] for name in self.names]
        self.needs_sparsity = rule.reads_sparsity and bool(self.names)
        self._layer_of = layer_of
        self._shares = [shares.contiguous() for shares in self._asked(rule.checked_share, [])] if rule.constant else []
        self.frozen = rule.constant and all(bool(((s == 0) | (s == 1)).all()) for s in self._shares)
        self._start = [before[name] for name in self.names]
        self.on_gradients = rule.space == "gradient" or (linear and not self.frozen)

    @cached_property
    def _before(self) -> list[Tensor]:
        """Return the parameters' values before a step, one tensor for each of :attr:`names`."""
        # A frozen entry never moves within the task, so its value at the task's start is its value before every step.
        return self._start if self.frozen else [torch.empty_like(value) for value in self._start]

    def _asked(self, method: Callable[[TaskUse, str, float | Tensor], Tensor], sparsity: LayerSparsity) -> list[Tensor]:
        """Return the results of a method of the rule, one tensor for each of :attr:`names`."""
        of_layers = [sparsity[self._layer_of(name)] if sparsity else 0.0 for name in self.names]
        return [method(self.use, name, kappa) for name, kappa in zip(self.names, of_layers, strict=True)]

    def _may_protect(self, name: str) -> bool:
        """Return True if the rule may protect an entry of the parameter ``name``."""
        parts = [self.use.covered[name], self.rule.expected_share(self.use, name)]
        return any(bool((stored(part) > 0).any()) for part in parts)

    def frozen_entries(self) -> dict[str, Tensor]:
        """Return parameter → bool tensor, True for frozen entries; an empty dict unless :attr:`frozen`."""
        return dict(zip(self.names, (shares == 1 for shares in self._shares), strict=True)) if self.frozen else {}

    def before_step(self, sparsity: LayerSparsity) -> None:
        """After the backward pass: scale gradients, or copy values; ``sparsity``: ``κ`` per layer (empty: not read)."""
        if not self.names:
            return
        if self.on_gradients:
            self._scale_gradients(sparsity)
            return
        if not self.rule.constant:
            self._shares = self._asked(self.rule.checked_share, sparsity)
        if not self.frozen:
            torch._foreach_copy_(self._before, [parameter.data for parameter in self.parameters])

    def _scale_gradients(self, sparsity: LayerSparsity) -> None:
        constant = self.rule.constant
        factors = self._shares if constant else self._asked(self.rule.divisor, sparsity)
        pairs = [(p.grad, of) for p, of in zip(self.parameters, factors, strict=True) if p.grad is not None]
        if not pairs:
            return
        gradients, factors = map(list, zip(*pairs, strict=True))
        if constant:
            torch._foreach_addcmul_(gradients, gradients, factors, value=-1)
        else:
            torch._foreach_div_(gradients, factors)

    def after_step(self) -> None:
        """Undo the protected share of the optimizer's step (lerp is exact at 0 and at 1)."""
        if self.names and not self.on_gradients:
            torch._foreach_lerp_([parameter.data for parameter in self.parameters], self._before, self._shares)
