"""AdaHAT as an Avalanche plugin: HAT whose used parameters may still move a little."""

from __future__ import annotations

from typing import Any

from avalanche_amnesia.training.plugins.hat import Adjustment, HATPlugin
from avalanche_amnesia.training.update_rules import AdaHATRule, AdjustmentRule

PAPER_ALPHA = 1e-6
"""The published intensity. In float32 it is close to no movement at all; the default is 1e-2."""


class AdaHATPlugin(HATPlugin):
    """Adaptive hard attention: a parameter in use keeps ``r/(importance + r)`` of its update.

    Args:
        alpha: intensity α > 0; larger lets used parameters move more. ``PAPER_ALPHA`` is the published 1e-6.
        epsilon: ε > 0.
        no_sum: ablation: the number of earlier tasks in place of the importance.
        no_reg: ablation: no layer sparsity, κ = 0.
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
        no_reg: bool = False,
        **kwargs: Any,
    ) -> None:
        if "adjustment" in kwargs:
            raise ValueError("AdaHAT's adjustment is its own; for hat, random or constant use HAT")
        self.epsilon, self.no_sum, self.no_reg = epsilon, no_sum, no_reg
        super().__init__(alpha=alpha, **kwargs)

    def _make_rule(self, adjustment: Adjustment | AdjustmentRule, alpha: float | None) -> AdjustmentRule:
        assert alpha is not None
        return AdaHATRule(alpha, self.epsilon, importance=not self.no_sum, sparsity=not self.no_reg)
