"""HAT and AdaHAT: strategies that learn a binary mask over units for each task."""

from typing import Unpack

from torch.optim import Optimizer

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.training.hard_attention import HardAttention
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.training.update_rules import AdaHATRule, AdjustmentRule


class HAT(TaskStrategy):
    """Strategy of hard attention (HAT): a task learns a mask over units; parameters that earlier tasks use are frozen.

    Mask of a layer: ``a_l = σ(s · e_l)``; the update of weight ``ij`` is multiplied by
    ``1 − min(a_{l,i}^{<t}, a_{l−1,j}^{<t})``, where ``a^{<t}`` is the cumulative mask of the earlier tasks that remain.

    Args:
        model: a :class:`MaskedModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        masks, adjustment, seed: as of :class:`HATPlugin`.
        options: ``reset_optimizer`` and Avalanche's own, as of :class:`TaskStrategy`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an invalid value.

    Reference: Serrà et al., Overcoming catastrophic forgetting with hard attention to the task, ICML 2018.
    """

    def __init__(
        self,
        *,
        model: MaskedModel,
        optimizer: Optimizer,
        masks: HardAttention | None = None,
        adjustment: str | AdjustmentRule = "hat",
        seed: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        masking = HATPlugin(masks=masks, adjustment=adjustment, seed=seed)
        super().__init__(model=model, optimizer=optimizer, method=[masking], seed=seed, **options)


class HATOptions(StrategyOptions, total=False):
    """Keyword arguments of :class:`HAT` that :class:`AdaHAT` also takes."""

    masks: HardAttention | None
    seed: int


class AdaHAT(HAT):
    """HAT strategy that allows changes of earlier tasks' parameters: smaller changes where more tasks use a parameter.

    The update of a parameter is multiplied by ``r_l / (importance + r_l)``, ``r_l = α / (ε + κ_l)``: ``importance``
    counts the tasks that use the unit before it or, if fewer, the unit after it; ``κ_l`` is the share of the layer's
    free units that the mask in training opens.

    Args:
        model, optimizer: as of :class:`HAT`.
        adjustment: by default ``adahat``; ``AdaHATRule(alpha=…)`` sets α (1e-2; in the paper 1e-6).
        options: further options of :class:`HAT`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an invalid value.

    Reference: Wang et al., AdaHAT: Adaptive Hard Attention to the Task in Task-Incremental Learning, ECML-PKDD 2024.
    """

    def __init__(
        self,
        *,
        model: MaskedModel,
        optimizer: Optimizer,
        adjustment: str | AdaHATRule | AdjustmentRule = "adahat",
        **options: Unpack[HATOptions],
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, adjustment=adjustment, **options)
