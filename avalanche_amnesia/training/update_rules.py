"""Rules of how far a parameter that earlier tasks use may still move, and the one place where they are enforced.

An :class:`AdjustmentRule` says, per parameter, the share of an update that is *held back* (0 free, 1 frozen: one
minus AdaHAT's adjustment rate). :class:`Adjuster` applies it around the optimizer's step: in update space,
``θ ← lerp(θ_after, θ_before, held)``, which holds under every optimizer; or to the gradient, as published.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.allocation import UnitAllocation
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.seeding import derive_seed

AdjustSpace = Literal["update", "gradient"]


class TaskUse:
    """Entries that the remaining tasks use while another one is trained: constant within that task, so computed once.

    Args:
        model: the masked model; its masks are those of the remaining tasks.
        locked: the tasks that count, where they remain; None: every remaining task.

    Attributes:
        in_use: cumulative mask ``a^{<t}`` of the tasks that count, bool ``(n_units,)``.
        covered: parameter → 1.0 where ``min`` of the cumulative masks is 1, else 0.0; the parameter's shape.
        importance: parameter → number of tasks, ``min`` of the summative masks; the parameter's shape.
        n_tasks: remaining tasks that count.
        fixed: parameter → 1.0 where an entry must keep its bits whatever the rule says, else 0.0; empty: nowhere.
    """

    def __init__(self, model: TaskMaskedModel, locked: Collection[int] | None = None) -> None:
        parameters = dict(model.backbone.named_parameters())
        counted = {task: mask for task, mask in model.masks.items() if locked is None or task in locked}
        masks = list(counted.values())
        self.n_tasks = len(masks)
        nothing = torch.zeros_like(model.cumulative_mask())
        self.in_use = torch.stack([nothing, *map(model.binary_mask, counted)]).any(0)
        cumulative = [model.by_layer(self.in_use)]
        self.covered = _dense(model.graph.parameter_use(*cumulative), parameters)
        self.importance = _dense(model.graph.parameter_use(*(masks or cumulative)), parameters)
        self.fixed: Mapping[str, Tensor] = {name: self.covered[name] for name in model.frozen_in_use}

    @classmethod
    def within(cls, model: MaskedModel, allocation: UnitAllocation) -> TaskUse:
        """Use that a task meets in its units: only entries that nobody else can read are free.

        Tasks that are permanent from the start may adjust what permanent tasks use, as the rule says; any other task
        leaves it as it is.
        """
        use = cls(model, allocation.related_tasks)
        use.in_use = ~allocation.own
        parameters = dict(model.backbone.named_parameters())
        fixed = {}
        for name, mine in model.graph.entries_within(allocation.own).items():
            adjustable = (use.covered[name] > 0) & allocation.permanent
            fixed[name] = (~mine & ~adjustable).to(parameters[name].dtype).contiguous()
        use.fixed = fixed
        return use


def _dense(uses: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: use.to(parameters[name].dtype).expand_as(parameters[name]).contiguous() for name, use in uses.items()}


class AdjustmentRule:
    """HAT's rule (``hat``): the cumulative mask ``min(a_i, a_j)`` is held back, so what is in use is frozen."""

    constant = True  # the same shares for every step of a task; a rule that varies holds nothing that is not in use
    reads_sparsity = False

    def start(self, seed: int, task: int) -> None:
        """Prepare for the steps of a task."""

    def held(self, use: TaskUse, name: str, sparsity: float) -> Tensor:
        """Share of the update held back, of the parameter's shape: 0 free, 1 frozen.

        Args:
            use: what the remaining tasks use.
            name: parameter name inside the backbone.
            sparsity: ``κ`` of the parameter's layer at this step.
        """
        return use.covered[name]

    def capacity(self, use: TaskUse) -> float:
        """Network capacity: the mean adjustment rate over all parameters that a next task would meet, ``κ = 0``."""
        held = [self.expected_held(use, name) for name in use.covered]
        return 1 - sum(float(h.double().sum()) for h in held) / sum(h.numel() for h in held)

    def expected_held(self, use: TaskUse, name: str) -> Tensor:
        """Mean of :meth:`held`, without layer sparsity."""
        return self.held(use, name, 0.0)


class RandomRule(AdjustmentRule):
    """``random``: a fresh U(0, 1) rate per step and parameter in use (AdaHAT's baseline)."""

    constant = False

    def start(self, seed: int, task: int) -> None:
        self.generator = torch.Generator().manual_seed(derive_seed(seed, "adjustment", task))

    def held(self, use: TaskUse, name: str, sparsity: float) -> Tensor:
        covered = use.covered[name]
        return covered * torch.rand(covered.shape, generator=self.generator).to(covered.device)

    def expected_held(self, use: TaskUse, name: str) -> Tensor:
        return use.covered[name] / 2


class ConstantRule(AdjustmentRule):
    """``constant``: rate ``α`` on every parameter in use; ``α = 1`` protects nothing (AdaHAT's baselines).

    Args:
        alpha: in ``[0, 1]``.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha of the constant adjustment must lie in [0, 1], got {alpha}")
        self.alpha = alpha

    def held(self, use: TaskUse, name: str, sparsity: float) -> Tensor:
        return use.covered[name] * (1 - self.alpha)


class AdaHATRule(AdjustmentRule):
    """AdaHAT: rate ``r_l / (importance + r_l)`` with ``r_l = α / (ε + κ_l)`` (Wang et al., ECML-PKDD 2024).

    Args:
        alpha: intensity ``α > 0``.
        epsilon: ``ε > 0``.
        importance: False for the ablation ``no_sum``: the number of earlier tasks in place of the importance, on
            parameters in use.
        sparsity: False for the ablation ``no_reg``: ``κ = 0``.
    """

    def __init__(
        self, alpha: float = 1e-2, epsilon: float = 0.1, *, importance: bool = True, sparsity: bool = True
    ) -> None:
        if alpha <= 0 or epsilon <= 0:
            raise ValueError(f"alpha and epsilon must be positive, got alpha={alpha}, epsilon={epsilon}")
        self.alpha, self.epsilon, self.by_importance, self.by_sparsity = alpha, epsilon, importance, sparsity
        self.constant, self.reads_sparsity = not sparsity, sparsity

    def held(self, use: TaskUse, name: str, sparsity: float) -> Tensor:
        rate = self.alpha / (self.epsilon + (sparsity if self.by_sparsity else 0.0))
        importance = use.importance[name] if self.by_importance else use.covered[name] * use.n_tasks
        total = importance + rate
        return torch.div(importance, total, out=total)


class Adjuster:
    """Applies a rule to a backbone around each optimizer step.

    Args:
        rule: what is held back; started.
        space: ``update`` or ``gradient``.
        use: what the remaining tasks use.
        parameters: the backbone's, by name inside the backbone.
        before: their values when the task began; a frozen entry is put back to these after every step.
        layer_of: from a parameter's name to the index of its layer in the vector of layer sparsities.
    """

    def __init__(
        self,
        rule: AdjustmentRule,
        space: AdjustSpace,
        use: TaskUse,
        *,
        parameters: Mapping[str, nn.Parameter],
        before: Mapping[str, Tensor],
        layer_of: Callable[[str], int],
    ) -> None:
        self.rule, self.space, self.use, self.layer_of = rule, space, use, layer_of
        # Where there is nothing to hold back, nothing is done: the first task pays nothing.
        self.names = [name for name in use.covered if self._may_hold(name)]
        self.parameters = [parameters[name] for name in self.names]
        self.needs_sparsity = rule.reads_sparsity and bool(self.names)
        self._held = self._shares([]) if rule.constant else []
        self._free = [1 - held for held in self._held] if space == "gradient" else []
        # A frozen entry never moves within the task, so the values at its start are the values before every step.
        self.frozen = rule.constant and all(bool(((held == 0) | (held == 1)).all()) for held in self._held)
        self._before = [before[name] if self.frozen else torch.empty_like(before[name]) for name in self.names]

    def _may_hold(self, name: str) -> bool:
        """Tell whether an entry of a parameter may be held back: one in use, a fixed one or whatever the rule holds."""
        parts = [self.use.covered[name], *([self.use.fixed[name]] if name in self.use.fixed else [])]
        if self.rule.constant:
            parts.append(self.rule.held(self.use, name, 0.0))
        return any(bool((part > 0).any()) for part in parts)

    def _shares(self, sparsity: list[float]) -> list[Tensor]:
        held = {
            name: self.rule.held(self.use, name, sparsity[self.layer_of(name)] if sparsity else 0.0)
            for name in self.names
        }
        fixed = self.use.fixed
        return [torch.maximum(share, fixed[name]) if name in fixed else share for name, share in held.items()]

    def frozen_entries(self) -> dict[str, Tensor]:
        """Parameter → bool tensor of the entries that are held back as a whole; empty unless all shares are 0 or 1."""
        return dict(zip(self.names, (held == 1 for held in self._held), strict=True)) if self.frozen else {}

    def before_step(self, sparsity: list[float]) -> None:
        """Prepare, after the backward pass, for a step; ``sparsity`` is ``κ`` per layer (empty: not read)."""
        if not self.names:
            return
        if not self.rule.constant:
            self._held = self._shares(sparsity)
            self._free = [1 - held for held in self._held] if self.space == "gradient" else []
        if self.space == "gradient":
            for parameter, free in zip(self.parameters, self._free, strict=True):
                if parameter.grad is not None:
                    parameter.grad.mul_(free)
        elif not self.frozen:
            torch._foreach_copy_(self._before, [parameter.data for parameter in self.parameters])

    def after_step(self) -> None:
        """Take back what is held of the optimizer's step (lerp is exact at 0 and at 1)."""
        if self.names and self.space == "update":
            torch._foreach_lerp_([parameter.data for parameter in self.parameters], self._before, self._held)
