"""Adjustment rules: limits on the optimizer's changes of parameters that earlier tasks use, and their enforcement.

An :class:`AdjustmentRule` gives, per parameter entry, the share of an update that is *protected*, i.e. undone (0 free,
1 frozen: one minus AdaHAT's adjustment rate). :class:`Adjuster` enforces it: in update space, ``θ ← lerp(θ_after,
θ_before, share)``, which protects under every optimizer; or by scaled gradients: as published, and for plain SGD,
because the result is equal and costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training.hat_formulas import LayerSparsity
from avalanche_amnesia.unit_graph.graph import Between, LazyMapping, UnitGraph

AdjustSpace = Literal["update", "gradient"]
Importance = Literal["sum", "flat", "number"]
Measure = Callable[[MaskedModel, int, Tensor, Tensor], Tensor]
"""Function from model, task, its samples ``(n, …)`` and labels ``(n,)`` to unit importances, ``(n_units,)``."""
LayerOf = Callable[[str], int]
"""Function from a parameter's name to the index of its layer."""


class TaskUse:
    """Parameter entries used by remaining tasks, or only by those in ``locked``, and how many tasks use each entry."""

    def __init__(self, model: TaskMaskedModel, locked: Collection[int] | None = None) -> None:
        self._counted = [task for task in model.masked_tasks if locked is None or task in locked]
        self.n_tasks = len(self._counted)
        self.in_use = model.cumulative_mask(self._counted)
        self.shapes = {name: (p.shape, p.dtype) for name, p in model.backbone.named_parameters()}
        self.covered = self._expand(model.graph.parameter_use(model.by_layer(self.in_use)))
        self._model = model

    def covered_by(self, between: Between) -> Mapping[str, Tensor]:
        """Return 0/1 tensors by parameter: 1 if both end units of a weight are in use (``min``), or one (``max``)."""
        return self.covered if between == "min" else self._by_max[0]

    def weight_importance(self, between: Between) -> Mapping[str, Tensor]:
        """Count the tasks that use a weight's input unit and output unit; return the ``min`` or ``max`` count."""
        return self.importance if between == "min" else self._by_max[1]

    @cached_property
    def importance(self) -> Mapping[str, Tensor]:
        """Return each weight's importance, by parameter: the number of tasks using its less used end unit."""
        return dict(self._expand(self._model.graph.parameter_use(*self._masks_by_task)))  # stored: read in every step

    @cached_property
    def _by_max(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        graph = self._model.graph
        if not isinstance(graph, UnitGraph):
            raise ValueError("between='max' is of masks over units: a weight that is masked itself lies between none")
        cumulative = [self._model.by_layer(self._model.cumulative_mask(self._counted))]
        reach = [graph.parameter_use(*masks, between="max") for masks in (cumulative, self._masks_by_task)]
        return self._expand(reach[0]), dict(self._expand(reach[1]))

    @property
    def _masks_by_task(self) -> list[Mapping[str, Tensor]]:
        """Return, for each task to be protected, its unit mask (or measured importances) as a dict by layer name."""
        model = self._model
        of_units = model.importance if isinstance(model, MaskedModel) else model.binary_mask
        masks = [model.by_layer(of_units(task)) for task in self._counted]
        return masks or [model.by_layer(torch.zeros_like(self.in_use))]

    def _expand(self, uses: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return ``uses`` with each tensor expanded to the shape of its parameter, and in the parameter's dtype."""
        return LazyMapping(uses, partial(_expand, uses, self.shapes))


def without_repeats(values: Tensor) -> Tensor:
    """Return an expanded tensor without its repeated entries; the result broadcasts to ``values``."""
    for dim, stride in enumerate(values.stride()):
        values = values.narrow(dim, 0, 1) if stride == 0 else values
    return values


def sum_entries(shares: Tensor) -> float:
    """Return the sum of a tensor's entries; of an expanded tensor, the sum of stored values times their repeats."""
    once = without_repeats(shares)
    return float(once.double().sum()) * (shares.numel() // once.numel())


def _expand(uses: Mapping[str, Tensor], like: Mapping[str, tuple[torch.Size, torch.dtype]], name: str) -> Tensor:
    shape, dtype = like[name]
    return uses[name].to(dtype).expand(shape)


RULES: dict[str, type[AdjustmentRule]] = {}
"""Name of a rule, as ``adjustment=`` takes it → its class; ``class MyRule(AdjustmentRule, name="mine")`` adds one."""


class AdjustmentRule:
    """Base class of rules that limit updates of earlier tasks' weights. Its own rule, ``hat``, freezes these weights.

    Args:
        between: how the masks of a weight's input and output unit are combined: ``min``, as published (a weight is in
            use if both units are), or ``max`` (if either is; the network's inputs are no units). Under every rule,
            ``max`` protects a superset: tasks stay as safe, and later tasks find fewer free entries.
        space: where the rule is enforced, ``update`` (protects under every optimizer) or ``gradient`` (as published:
            right for plain SGD only).
        locked: labels of the protected tasks; in the regulariser, the adjustment and the network's capacity
            only their masks count as in use. None: every remaining task. A label may name a future task of the stream,
            which is locked once it is trained; a label that the stream does not have is an error. A later task may
            overwrite entries that only unlocked tasks use, so that their logits change; unlearning the later task
            restores the overwritten values.

    Raises:
        ValueError: for an invalid value.

    Reference: Serrà et al., ICML 2018; ``locked``: Duan, HAT-CL, 2023.
    """

    constant = True  # the same shares for every step of a task; False: computed in every step
    reads_sparsity = False  # False: ``sparsity`` is always 0.0
    measure: Measure | None = None

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            other = RULES.get(name)
            if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"a rule called {name!r} is there already, {other.__qualname__}: choose another name")
            RULES[name] = cls

    def __init__(
        self, *, between: Between = "min", space: AdjustSpace = "update", locked: Iterable[int] | None = None
    ) -> None:
        checks.one_of("between", between, Between)
        checks.one_of("space", space, AdjustSpace)
        self.between, self.space = between, space
        labels = () if locked is None else checks.integers("locked", locked, "task labels")
        self.locked = None if locked is None else tuple(sorted(set(labels)))

    def start(self, seed: int, task: int) -> None:
        """Prepare the rule for the steps of a task; its random draws are seeded with ``seed`` and ``task``."""

    def protected_share(self, use: TaskUse, name: str, sparsity: float | Tensor) -> Tensor:
        """Return the share of each entry's update to block, 0 (free) to 1 (frozen); it may be a ``Tensor.expand`` view.

        Args:
            use: entries that the remaining tasks use.
            name: parameter name inside the backbone.
            sparsity: ``κ`` of the parameter's layer at this step; on an accelerator a tensor ``()``.
        """
        return use.covered_by(self.between)[name]

    def checked_share(self, use: TaskUse, name: str, sparsity: float | Tensor) -> Tensor:
        """Return :meth:`protected_share` after a check of its shape and range: a user's rule may return anything."""
        share, shape = self.protected_share(use, name, sparsity), use.shapes[name][0]
        if not isinstance(share, Tensor) or share.shape != shape:
            given = f"one of {tuple(share.shape)}" if isinstance(share, Tensor) else repr(share)
            raise TypeError(f"protected_share must return a tensor of the shape of {name}, {tuple(shape)}; got {given}")
        once = without_repeats(share)
        if self.constant and not bool(((once >= 0) & (once <= 1)).all()):  # checked once a task, not in every step
            raise ValueError(
                f"{type(self).__name__}.protected_share must return shares from 0, free, to 1, frozen; of {name} it "
                f"returned some from {float(share.min()):.3g} to {float(share.max()):.3g}"
            )
        return share

    def divisor(self, use: TaskUse, name: str, sparsity: float | Tensor) -> Tensor:
        """Return ``1 / (1 − share)``: dividing a gradient by it blocks the protected share. The result broadcasts."""
        return 1 / (1 - without_repeats(self.checked_share(use, name, sparsity)))

    def capacity(self, use: TaskUse) -> float:
        """Return the network's capacity for a next task, 0 to 1: the mean share of an update that the rule allows."""
        shares = [self.expected_share(use, name) for name in use.covered]
        return 1 - sum(map(sum_entries, shares)) / sum(share.numel() for share in shares)

    def expected_share(self, use: TaskUse, name: str) -> Tensor:
        """Return the share of each entry's update that the rule blocks at sparsity 0, as a mean over random draws."""
        return self.checked_share(use, name, 0.0)


RULES["hat"] = AdjustmentRule


class RandomRule(AdjustmentRule, name="random"):
    """Rule ``random`` (AdaHAT's baseline): multiplies updates of entries in use by new random factors from U(0, 1).

    Args:
        between, space, locked: as of :class:`AdjustmentRule`.
    """

    constant = False

    def start(self, seed: int, task: int) -> None:
        self.generator = torch.Generator().manual_seed(derive_seed(seed, "adjustment", task))

    def protected_share(self, use: TaskUse, name: str, sparsity: float | Tensor) -> Tensor:
        covered = use.covered_by(self.between)[name]
        return covered * torch.rand(covered.shape, generator=self.generator).to(covered.device)

    def expected_share(self, use: TaskUse, name: str) -> Tensor:
        covered = use.covered_by(self.between)[name]
        return (without_repeats(covered) / 2).expand_as(covered)


class ConstantRule(AdjustmentRule, name="constant"):
    """Rule ``constant`` (AdaHAT's baselines): multiplies updates of entries in use by ``α``; ``α = 1`` protects none.

    Args:
        alpha: in ``[0, 1]``.
        between, space, locked: as of :class:`AdjustmentRule`.

    Raises:
        ValueError: for an invalid value.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        between: Between = "min",
        space: AdjustSpace = "update",
        locked: Iterable[int] | None = None,
    ) -> None:
        super().__init__(between=between, space=space, locked=locked)
        checks.within("alpha of the constant adjustment", alpha, "[0, 1]")
        self.alpha = alpha

    def protected_share(self, use: TaskUse, name: str, sparsity: float | Tensor) -> Tensor:
        covered = use.covered_by(self.between)[name]
        return (without_repeats(covered) * (1 - self.alpha)).expand_as(covered)


PAPER_ALPHA = 1e-6
"""AdaHAT's published intensity. In float32 it allows almost no movement; the default is 1e-2."""


class AdaHATRule(AdjustmentRule, name="adahat"):
    """AdaHAT's rule: multiplies updates by ``r_l / (importance + r_l)``, ``r_l = α / (ε + κ_l)`` (Wang et al., 2024).

    Args:
        alpha: intensity ``α > 0``; larger lets used parameters move more. ``PAPER_ALPHA`` is the published 1e-6.
        epsilon: ``ε > 0``.
        importance: ``sum``: the number of earlier tasks that use the parameter; ``number``, the published ablation
            ``no_sum``: the number of the task in training, from 1, for all parameters, free ones and the first task's
            too; ``flat``, our ablation ``flat_sum``: the number of earlier tasks, only on parameters in use. A function
            ``(model, task, x, y) → (n_units,)``, such as those of ``experiments/importance.py``, measures
            the importance of each unit at a task's end, at least 0: the sum is then over these numbers, divided by the
            largest one of the layer, instead of masks. Unlearned tasks do not count.
        sparsity: False for the ablation ``no_reg``: ``κ = 0``.
        between, space, locked: as of :class:`AdjustmentRule`.

    Raises:
        ValueError: for an invalid value; for ``between="max"`` with ``number``, which reads no masks.
    """

    def __init__(
        self,
        alpha: float = 1e-2,
        epsilon: float = 0.1,
        *,
        importance: Importance | Measure = "sum",
        sparsity: bool = True,
        between: Between = "min",
        space: AdjustSpace = "update",
        locked: Iterable[int] | None = None,
    ) -> None:
        super().__init__(between=between, space=space, locked=locked)
        checks.above("alpha", alpha, 0)
        checks.above("epsilon", epsilon, 0)
        if not callable(importance):
            checks.one_of("importance", importance, Importance)
        if importance == "number" and between == "max":
            raise ValueError("between='max' has no meaning where every parameter has the task's number for importance")
        self.alpha, self.epsilon, self.importance, self.sparsity = alpha, epsilon, importance, sparsity
        self.measure = importance if callable(importance) else None
        self.constant, self.reads_sparsity = not sparsity, sparsity

    def protected_share(self, use: TaskUse, name: str, sparsity: float | Tensor) -> Tensor:
        importance = self.importance_of(use, name)
        shares = importance + self.rate(sparsity)
        return torch.div(importance, shares, out=shares).expand(use.shapes[name][0])

    def rate(self, sparsity: float | Tensor) -> float | Tensor:
        """Return a layer's rate ``r_l = α / (ε + κ_l)``; updates are multiplied by ``r_l / (importance + r_l)``."""
        return self.alpha / (self.epsilon + (sparsity if self.sparsity else 0.0))

    def importance_of(self, use: TaskUse, name: str) -> Tensor:
        """Return the importance of a parameter's entries, in a smaller shape that broadcasts to the parameter's."""
        if self.importance == "number":
            return torch.full_like(without_repeats(use.covered[name]), use.n_tasks + 1)
        if self.importance == "flat":
            return without_repeats(use.covered_by(self.between)[name]) * use.n_tasks
        return without_repeats(use.weight_importance(self.between)[name])

    def divisor(self, use: TaskUse, name: str, sparsity: float | Tensor) -> Tensor:
        """Return ``1 + importance / r_l``, equal to ``1 / (1 − share)`` of the base class, but faster to compute."""
        importance, inverse = self.importance_of(use, name), 1 / self.rate(sparsity)
        one = importance.new_ones(())
        if isinstance(inverse, Tensor):
            return torch.addcmul(one, importance, inverse)
        return torch.add(one, importance, alpha=inverse)


def measure_importance(measure: Measure, model: MaskedModel, task: int, x: Tensor, y: Tensor) -> Tensor:
    """Return each unit's importance to a finished task, ``(n_units,)``: each layer's largest is 1; 0 outside the mask.

    A layer whose measure is 0 for all units counts by its mask, because nothing else would protect it.
    """
    mask = model.binary_mask(task)
    found = torch.as_tensor(measure(model, task, x, y)).detach().to(mask.device, torch.float32)
    if found.shape != mask.shape or not bool(found.isfinite().all()) or bool((found < 0).any()):
        raise ValueError(
            f"importance= must return a finite number of at least 0 for each of the {len(mask)} units, (n_units,); got "
            f"shape {tuple(found.shape)} from {float(found.min()):g} to {float(found.max()):g}"
        )
    of_layers = zip(model.by_layer(found * mask).values(), model.by_layer(mask.float()).values(), strict=True)
    return torch.cat([layer / layer.max() if bool(layer.any()) else used for layer, used in of_layers])


def as_rule(adjustment: str | AdjustmentRule) -> AdjustmentRule:
    """Return ``adjustment`` if it is a rule, or a new rule of that name; raise ValueError for an unknown name."""
    if isinstance(adjustment, AdjustmentRule):
        return adjustment
    if adjustment not in RULES:
        raise ValueError(f"adjustment must be one of {', '.join(map(repr, RULES))}, or a rule; got {adjustment!r}")
    return RULES[adjustment]()


# Enforcement of a rule ------------------------------------------------------------------------------------------------


class Adjuster:
    """Protection of earlier tasks in each optimizer step: scales gradients down, or undoes a share of the updates.

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
        parts = ((name, part) for name in use.covered for part in (use.covered[name], rule.expected_share(use, name)))
        self.names = list(dict.fromkeys(name for name, part in parts if bool((without_repeats(part) > 0).any())))
        self.parameters = [parameters[name] for name in self.names]
        self.needs_sparsity = rule.reads_sparsity and bool(self.names)
        self._layer_of = layer_of
        self._shares = [shares.contiguous() for shares in self._apply(rule.checked_share, [])] if rule.constant else []
        self.frozen = rule.constant and all(bool(((s == 0) | (s == 1)).all()) for s in self._shares)
        self._start = [before[name] for name in self.names]
        self.on_gradients = rule.space == "gradient" or (linear and not self.frozen)

    @cached_property
    def _values_before(self) -> list[Tensor]:
        """Return the parameters' values before a step, one tensor for each of :attr:`names`."""
        # A frozen entry never moves within the task, so its value at the task's start is its value before every step.
        return self._start if self.frozen else [torch.empty_like(value) for value in self._start]

    def _apply(self, method: Callable[[TaskUse, str, float | Tensor], Tensor], sparsity: LayerSparsity) -> list[Tensor]:
        """Call a method of the rule for each parameter in :attr:`names`, and return the resulting tensors."""
        of_layers = [sparsity[self._layer_of(name)] if sparsity else 0.0 for name in self.names]
        return [method(self.use, name, kappa) for name, kappa in zip(self.names, of_layers, strict=True)]

    def frozen_entries(self) -> dict[str, Tensor]:
        """Return a dict of parameter name to bool mask of its frozen entries; empty unless :attr:`frozen`."""
        return dict(zip(self.names, (shares == 1 for shares in self._shares), strict=True)) if self.frozen else {}

    def before_step(self, sparsity: LayerSparsity) -> None:
        """After the backward pass: scale gradients if ``on_gradients``, else copy the weights to undo updates later."""
        if not self.names:
            return
        if self.on_gradients:
            self._scale_gradients(sparsity)
        elif not self.frozen:
            if not self.rule.constant:
                self._shares = self._apply(self.rule.checked_share, sparsity)
            torch._foreach_copy_(self._values_before, [parameter.data for parameter in self.parameters])

    def _scale_gradients(self, sparsity: LayerSparsity) -> None:
        constant = self.rule.constant
        factors = self._shares if constant else self._apply(self.rule.divisor, sparsity)
        pairs = [(p.grad, of) for p, of in zip(self.parameters, factors, strict=True) if p.grad is not None]
        if not pairs:
            return
        gradients, factors = map(list, zip(*pairs, strict=True))
        if constant:
            torch._foreach_addcmul_(gradients, gradients, factors, value=-1)
        else:
            torch._foreach_div_(gradients, factors)

    def after_step(self) -> None:
        """After the optimizer's step: undo the blocked share of each update (lerp is exact at shares 0 and 1)."""
        if self.names and not self.on_gradients:
            torch._foreach_lerp_([parameter.data for parameter in self.parameters], self._values_before, self._shares)
