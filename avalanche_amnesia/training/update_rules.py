"""Rules of how far a parameter that earlier tasks use may still move, and the one place where they are enforced.

An :class:`AdjustmentRule` says, per parameter, the share of an update that is *held back* (0 free, 1 frozen: one
minus AdaHAT's adjustment rate). :class:`Adjuster` applies it around the optimizer's step: in update space,
``θ ← lerp(θ_after, θ_before, held)``, which holds under every optimizer; or to the gradient, as published.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.models.allocation import UnitAllocation
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training.optimizers import faint_below
from avalanche_amnesia.unit_graph.graph import Between, UnitGraph

AdjustSpace = Literal["update", "gradient"]
Importance = Literal["sum", "flat", "number"]

_LONG = 32
"""Neighbours with a share in common from which on an expanded tensor is the faster one, as measured."""


class TaskUse:
    """Entries that the remaining tasks use while another one is trained: constant within that task, so computed once.

    Args:
        model: the masked model; its masks are those of the remaining tasks.
        locked: the tasks that count, where they remain; None: every remaining task.

    Attributes:
        in_use: cumulative mask ``a^{<t}`` of the tasks that count, bool ``(n_units,)``.
        covered: parameter → 1.0 where ``min`` of the cumulative masks is 1, else 0.0; the parameter's shape, expanded
            from one number per unit where no mask lies at the other end.
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
        self.covered = _expanded(model.graph.parameter_use(*cumulative), parameters)
        # Plain dictionaries: views can't be copied, and with a strategy in training this is.
        self._graph, self._masks = model.graph, [[dict(m) for m in each] for each in (cumulative, masks or cumulative)]
        self.fixed: Mapping[str, Tensor] = {name: self.covered[name] for name in model.frozen_in_use}

    def covered_by(self, between: Between) -> Mapping[str, Tensor]:
        """:attr:`covered`; for ``max`` 1.0 where ``max`` of the cumulative masks is 1."""
        return self.covered if between == "min" else self._by_max[0]

    def importance_by(self, between: Between) -> Mapping[str, Tensor]:
        """:attr:`importance`; for ``max`` the ``max`` of the summative masks."""
        return self.importance if between == "min" else self._by_max[1]

    @cached_property
    def importance(self) -> dict[str, Tensor]:
        """Parameter → number of tasks, ``min`` of the summative masks; shaped as :attr:`covered`."""
        return _expanded(self._graph.parameter_use(*self._masks[1]), self.covered)

    @cached_property
    def _by_max(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not isinstance(self._graph, UnitGraph):
            raise ValueError("between='max' is of masks over units: a weight that is masked itself lies between none")
        reach = [self._graph.parameter_use(*masks, between="max") for masks in self._masks]
        return _expanded(reach[0], self.covered), _expanded(reach[1], self.covered)

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
            adjustable = (stored(use.covered[name]) > 0) & allocation.permanent
            fixed[name] = ~mine & ~adjustable
        use.fixed = _expanded(fixed, parameters)
        return use


def stored(values: Tensor) -> Tensor:
    """Entries of an expanded tensor as they are stored, each once; broadcasts to it."""
    for dim, stride in enumerate(values.stride()):
        values = values.narrow(dim, 0, 1) if stride == 0 else values
    return values


def _expanded(uses: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: use.to(parameters[name].dtype).expand_as(parameters[name]) for name, use in uses.items()}


class AdjustmentRule:
    """HAT's rule (``hat``): the cumulative mask ``min(a_i, a_j)`` is held back, so what is in use is frozen.

    Args:
        between: how the masks of the units at both ends of a weight make one: ``min``, as published (it is in use if
            both ends are), or ``max`` (if either is; the network's input counts as no end). ``max`` holds back a
            superset, here and in every rule: what tasks own stays as safe, and later tasks find less that is free.

    Raises:
        ValueError: for a value that is not allowed.
    """

    constant = True  # the same shares for every step of a task
    reads_sparsity = False
    between: Between = "min"

    def __init__(self, *, between: Between = "min") -> None:
        checks.one_of("between", between, Between)
        self.between = between

    def start(self, seed: int, task: int) -> None:
        """Prepare for the steps of a task."""

    def held(self, use: TaskUse, name: str, sparsity: float) -> Tensor:
        """Share of the update held back, of the parameter's shape: 0 free, 1 frozen; best as an expanded one.

        Args:
            use: what the remaining tasks use.
            name: parameter name inside the backbone.
            sparsity: ``κ`` of the parameter's layer at this step.
        """
        return use.covered_by(self.between)[name]

    def prepared(
        self, use: TaskUse, names: Sequence[str], layer_of: Callable[[str], int]
    ) -> Callable[[Sequence[float]], list[Tensor]]:
        """:meth:`held` of several parameters as a function of ``κ`` of all layers (empty: not read), once per step.

        Args:
            use: what the remaining tasks use.
            names: the parameters, inside the backbone.
            layer_of: from a parameter's name to the index of its layer.
        """
        return partial(self._one_by_one, use, names, layer_of)  # no closure: a strategy in training can be copied

    def _one_by_one(
        self, use: TaskUse, names: Sequence[str], layer_of: Callable[[str], int], sparsity: Sequence[float]
    ) -> list[Tensor]:
        return [self.held(use, name, sparsity[layer_of(name)] if sparsity else 0.0) for name in names]

    def capacity(self, use: TaskUse) -> float:
        """Network capacity: the mean adjustment rate over all parameters that a next task would meet, ``κ = 0``."""
        held = [self.expected_held(use, name) for name in use.covered]
        return 1 - sum(map(_total, held)) / sum(h.numel() for h in held)

    def expected_held(self, use: TaskUse, name: str) -> Tensor:
        """Mean of :meth:`held`, without layer sparsity."""
        return self.held(use, name, 0.0)


class RandomRule(AdjustmentRule):
    """``random``: a fresh U(0, 1) rate per step and parameter in use (AdaHAT's baseline).

    Args:
        between: as of :class:`AdjustmentRule`.
    """

    constant = False

    def start(self, seed: int, task: int) -> None:
        self.generator = torch.Generator().manual_seed(derive_seed(seed, "adjustment", task))

    def held(self, use: TaskUse, name: str, sparsity: float) -> Tensor:
        covered = use.covered_by(self.between)[name]
        return covered * torch.rand(covered.shape, generator=self.generator).to(covered.device)

    def expected_held(self, use: TaskUse, name: str) -> Tensor:
        covered = use.covered_by(self.between)[name]
        return (stored(covered) / 2).expand_as(covered)


class ConstantRule(AdjustmentRule):
    """``constant``: rate ``α`` on every parameter in use; ``α = 1`` protects nothing (AdaHAT's baselines).

    Args:
        alpha: in ``[0, 1]``.
        between: as of :class:`AdjustmentRule`.
    """

    def __init__(self, alpha: float = 1.0, *, between: Between = "min") -> None:
        super().__init__(between=between)
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha of the constant adjustment must lie in [0, 1], got {alpha}")
        self.alpha = alpha

    def held(self, use: TaskUse, name: str, sparsity: float) -> Tensor:
        covered = use.covered_by(self.between)[name]
        return (stored(covered) * (1 - self.alpha)).expand_as(covered)


class AdaHATRule(AdjustmentRule):
    """AdaHAT: rate ``r_l / (importance + r_l)`` with ``r_l = α / (ε + κ_l)`` (Wang et al., ECML-PKDD 2024).

    Args:
        alpha: intensity ``α > 0``.
        epsilon: ``ε > 0``.
        importance: ``sum``: the number of earlier tasks that use the parameter; ``number``, the published ablation
            ``no_sum``: the number of the task in training, from 1, for all parameters, free ones and the first task's
            too; ``flat``, our ablation ``flat_sum``: the number of earlier tasks, on parameters in use alone. Tasks
            that were unlearned do not count.
        sparsity: False for the ablation ``no_reg``: ``κ = 0``.
        between: as of :class:`AdjustmentRule`.

    Raises:
        ValueError: for a value that is not allowed; for ``between="max"`` with ``number``, which reads no masks.
    """

    def __init__(
        self,
        alpha: float = 1e-2,
        epsilon: float = 0.1,
        *,
        importance: Importance = "sum",
        sparsity: bool = True,
        between: Between = "min",
    ) -> None:
        super().__init__(between=between)
        if alpha <= 0 or epsilon <= 0:
            raise ValueError(f"alpha and epsilon must be positive, got alpha={alpha}, epsilon={epsilon}")
        checks.one_of("importance", importance, Importance)
        if importance == "number" and between == "max":
            raise ValueError("between='max' has no meaning where every parameter has the task's number for importance")
        self.alpha, self.epsilon, self.importance, self.sparsity = alpha, epsilon, importance, sparsity
        self.constant, self.reads_sparsity = not sparsity, sparsity

    def held(self, use: TaskUse, name: str, sparsity: float) -> Tensor:
        importance = self._importance(use, name)
        return (importance / (importance + self._rate(sparsity))).expand_as(use.covered[name])

    def _rate(self, sparsity: float) -> float:
        return self.alpha / (self.epsilon + (sparsity if self.sparsity else 0.0))

    def prepared(
        self, use: TaskUse, names: Sequence[str], layer_of: Callable[[str], int]
    ) -> Callable[[Sequence[float]], list[Tensor]]:
        if not names:
            return super().prepared(use, names, layer_of)
        # In one vector, layer by layer: an operation per parameter costs more than what it computes.
        parts = {name: self._importance(use, name) for name in sorted(names, key=layer_of)}
        importance = torch.cat([part.reshape(-1) for part in parts.values()])
        held = torch.empty_like(importance)
        split = held.split([part.numel() for part in parts.values()])
        shares = {n: v.view_as(parts[n]).expand_as(use.covered[n]) for n, v in zip(parts, split, strict=True)}
        layers = sorted({layer_of(name) for name in names})
        sizes = [sum(part.numel() for name, part in parts.items() if layer_of(name) == layer) for layer in layers]
        of_layers = list(zip(layers, importance.split(sizes), held.split(sizes), strict=True))
        return partial(self._all_at_once, importance, held, of_layers, [shares[name] for name in names])

    def _all_at_once(
        self,
        importance: Tensor,
        held: Tensor,
        of_layers: Sequence[tuple[int, Tensor, Tensor]],
        shares: list[Tensor],
        sparsity: Sequence[float],
    ) -> list[Tensor]:
        """``shares``, views of ``held``, once it is that of all layers."""
        for layer, of_layer, out in of_layers:
            torch.add(of_layer, self._rate(sparsity[layer] if sparsity else 0.0), out=out)
        torch.div(importance, held, out=held)
        return shares

    def _importance(self, use: TaskUse, name: str) -> Tensor:
        """Importance, each stored entry once."""
        if self.importance == "number":
            return torch.full_like(stored(use.covered[name]), use.n_tasks + 1)
        if self.importance == "flat":
            return stored(use.covered_by(self.between)[name]) * use.n_tasks
        return stored(use.importance_by(self.between)[name])


class Adjuster:
    """Applies a rule to a backbone around each optimizer step.

    Args:
        rule: what is held back; started.
        space: ``update`` or ``gradient``.
        use: what the remaining tasks use.
        parameters: the backbone's, by name inside the backbone.
        before: their values when the task began; a frozen entry is put back to these after every step.
        layer_of: from a parameter's name to the index of its layer in the vector of layer sparsities.
        zero_rests: whether the optimizer leaves an entry whose gradient is 0 as it is, bit for bit. Where entries are
            frozen or free, and nothing between, their gradients are then set to 0, which costs less than putting the
            entries back, and comes to the same.

    Attributes:
        on_gradients: whether gradients are scaled in front of the step, and nothing is taken back behind it.
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
        zero_rests: bool = False,
    ) -> None:
        self.rule, self.use = rule, use
        # Where there is nothing to hold back, nothing is done: the first task pays nothing.
        self.names = [name for name in use.covered if self._may_hold(name)]
        self.parameters = [parameters[name] for name in self.names]
        self.needs_sparsity = rule.reads_sparsity and bool(self.names)
        self._prepared = rule.prepared(use, self.names, layer_of)
        self._held = self._shares([]) if rule.constant else []
        self._free: list[Tensor] = []
        self._weights: list[Tensor] = []
        # A frozen entry never moves within the task, so the values at its start are the values before every step.
        self.frozen = rule.constant and all(bool(((h == 0) | (h == 1)).all()) for h in map(stored, self._held))
        self._before = [before[name] if self.frozen else torch.empty_like(before[name]) for name in self.names]
        self.on_gradients = space == "gradient" or (zero_rests and self.frozen and self._all_rest())

    def _all_rest(self) -> bool:
        """Tell whether each frozen entry stays as it is without a gradient: -0 becomes 0, faint ones are cleared."""
        for before, held in zip(self._before, self._held, strict=True):
            rests = (before.abs() > faint_below(before.dtype)) | ((before == 0) & ~before.signbit())
            if bool(((held == 1) & ~rests).any()):
                return False
        return True

    def _may_hold(self, name: str) -> bool:
        """Tell whether an entry of a parameter may be held back: one in use, a fixed one or whatever the rule holds."""
        parts = [self.use.covered[name], self.rule.expected_held(self.use, name)]
        parts += [self.use.fixed[name]] if name in self.use.fixed else []
        return any(bool((stored(part) > 0).any()) for part in parts)

    def _shares(self, sparsity: Sequence[float]) -> list[Tensor]:
        held, fixed = zip(self.names, self._prepared(sparsity), strict=True), self.use.fixed
        return [_larger(share, fixed[name]) if name in fixed else share for name, share in held]

    def frozen_entries(self) -> dict[str, Tensor]:
        """Parameter → bool tensor of the entries that are held back as a whole; empty unless shares are 0 or 1."""
        return dict(zip(self.names, (stored(held) == 1 for held in self._held), strict=True)) if self.frozen else {}

    def rate(self) -> float:
        """Mean, over all parameters, of the share that this step's updates keep: 1 nothing is held back; 0 all is."""
        return self._rate if self.rule.constant else self._mean_rate()

    @cached_property
    def _rate(self) -> float:
        return self._mean_rate()

    def _mean_rate(self) -> float:
        n_entries = sum(covered.numel() for covered in self.use.covered.values())
        return 1 - sum(map(_total, self._held)) / n_entries

    def before_step(self, sparsity: Sequence[float]) -> None:
        """Prepare, after the backward pass, for a step; ``sparsity`` is ``κ`` per layer (empty: not read)."""
        if not self.names:
            return
        if not self.rule.constant:
            self._held, self._free, self._weights = self._shares(sparsity), [], []
        if self.on_gradients:
            self._free = self._free or [1 - stored(held) for held in self._held]
            pairs = zip(self.parameters, self._free, strict=True)
            reached = [(parameter.grad, free) for parameter, free in pairs if parameter.grad is not None]
            if reached:
                torch._foreach_mul_(*map(list, zip(*reached, strict=True)))
        elif not self.frozen:
            torch._foreach_copy_(self._before, [parameter.data for parameter in self.parameters])

    def after_step(self) -> None:
        """Take back what is held of the optimizer's step (lerp is exact at 0 and at 1)."""
        if self.names and not self.on_gradients:
            self._weights = self._weights or [_in_long_rows(held) for held in self._held]
            torch._foreach_lerp_([parameter.data for parameter in self.parameters], self._before, self._weights)


def _larger(first: Tensor, second: Tensor) -> Tensor:
    return torch.maximum(stored(first), stored(second)).expand_as(first)


def _total(shares: Tensor) -> float:
    """Sum over all entries."""
    once = stored(shares)
    return float(once.double().sum()) * (shares.numel() // once.numel())


def _in_long_rows(shares: Tensor) -> Tensor:
    """The same shares, dense where few neighbours have one in common: an expanded tensor would cost more then."""
    in_common = 1
    for size, stride in zip(reversed(shares.shape), reversed(shares.stride()), strict=True):
        if stride:
            break
        in_common *= size
    return shares if in_common >= _LONG else shares.contiguous()
