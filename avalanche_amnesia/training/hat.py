"""HAT: hard attention to the task."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.task_strategy import HardAttentionStrategy, split_options


class HAT(HardAttentionStrategy):
    """Hard attention to the task: a task learns a binary mask over the units; what earlier masks use is frozen.

    Mask of a layer: ``a_l = σ(s · e_l)``; the update of weight ``ij`` is multiplied by
    ``1 − min(a_{l,i}^{<t}, a_{l−1,j}^{<t})``, where ``a^{<t}`` is the cumulative mask of the earlier tasks that remain.

    Args:
        model: a :class:`MaskedModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        seed: every draw derives from it and the task.
        options: those of :class:`HATPlugin` (``masks=HardAttention(…)`` or ``s_max`` and its other settings,
            ``adjustment``, ``locked``, ``isolation`` …) and of :class:`HardAttentionStrategy` (``train_mb_size``,
            ``train_epochs``, ``plugins``, ``evaluator`` …).

    Raises:
        TypeError: for an unknown option.
        ValueError: for a value that is not allowed.

    Reference: Serrà et al., Overcoming catastrophic forgetting with hard attention to the task, ICML 2018.
    """

    def __init__(self, *, model: MaskedModel, optimizer: Optimizer, seed: int = 0, **options: Any) -> None:
        masking, rest = split_options(options, HATPlugin, HAT)
        super().__init__(model=model, optimizer=optimizer, masking=HATPlugin(**masking, seed=seed), seed=seed, **rest)
