"""AdaHAT as an Avalanche plugin: HAT whose used parameters may still move a little."""

from __future__ import annotations

from typing import Any

from avalanche_amnesia.training.plugins.hat import Adjustment, HATPlugin
from avalanche_amnesia.training.update_rules import AdaHATRule, AdjustmentRule, Importance
from avalanche_amnesia.unit_graph.graph import Between

PAPER_ALPHA = 1e-6
"""The published intensity. In float32 it is close to no movement at all; the default is 1e-2."""


class AdaHATPlugin(HATPlugin):
    """Adaptive hard attention: a parameter in use keeps ``r/(importance + r)`` of its update.

    Args:
        alpha: intensity α > 0; larger lets used parameters move more. ``PAPER_ALPHA`` is the published 1e-6.
        epsilon: ε > 0.
        no_sum: published ablation: the number of the task in training, from 1, in place of the importance, for all
            parameters: free ones are damped too, and so is the first task, as they are in the authors' code.
        flat_sum: our milder form of it: the number of earlier tasks, on parameters in use alone. Not with ``no_sum``.
        no_reg: ablation: no layer sparsity, κ = 0.
        between: ``min`` or ``max`` of the masks at both ends of a weight
            (:class:`~avalanche_amnesia.training.update_rules.AdjustmentRule`). ``max`` not with ``no_sum``.
        kwargs: those of :class:`HATPlugin`, without ``adjustment``.

    Raises:
        ValueError: for a value that is not allowed.

    Reference: Wang et al., AdaHAT: Adaptive Hard Attention to the Task, ECML-PKDD 2024.
    """

    def __init__(
        self,
        *,
        alpha: float = 1e-2,
        epsilon: float = 0.1,
        no_sum: bool = False,
        flat_sum: bool = False,
        no_reg: bool = False,
        between: Between = "min",
        **kwargs: Any,
    ) -> None:
        if "adjustment" in kwargs:
            raise ValueError("AdaHAT's adjustment is its own; for hat, random or constant use HAT")
        if no_sum and flat_sum:
            raise ValueError("no_sum and flat_sum both replace the importance: choose one")
        self.epsilon, self.no_sum, self.flat_sum, self.no_reg = epsilon, no_sum, flat_sum, no_reg
        self.between = between
        super().__init__(alpha=alpha, **kwargs)

    def _make_rule(self, adjustment: Adjustment | AdjustmentRule, alpha: float | None) -> AdjustmentRule:
        assert alpha is not None
        importance: Importance = "number" if self.no_sum else "flat" if self.flat_sum else "sum"
        return AdaHATRule(alpha, self.epsilon, importance=importance, sparsity=not self.no_reg, between=self.between)
