"""AdaHAT: adaptive hard attention to the task."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.training.plugins.adahat import AdaHATPlugin
from avalanche_amnesia.training.task_strategy import HardAttentionStrategy, split_options


class AdaHAT(HardAttentionStrategy):
    """HAT whose used parameters may still move: the less, the more tasks use them.

    The update of a parameter is multiplied by ``r_l / (importance + r_l)``, ``r_l = α / (ε + κ_l)``: ``importance``
    counts the tasks that use it, ``κ_l`` is the share of the layer's free units that the mask in training opens.

    Args:
        model: a :class:`MaskedModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        seed: every draw derives from it and the task.
        options: those of :class:`AdaHATPlugin` (``alpha``, ``epsilon``, ``no_sum``, ``flat_sum``, ``no_reg``,
            ``between``, and HAT's without ``adjustment``) and of :class:`HardAttentionStrategy` (``train_mb_size``,
            ``train_epochs`` …).

    Raises:
        TypeError: for an unknown option.
        ValueError: for a value that is not allowed.

    Reference: Wang et al., AdaHAT: Adaptive Hard Attention to the Task in Task-Incremental Learning, ECML-PKDD 2024.
    """

    def __init__(self, *, model: MaskedModel, optimizer: Optimizer, seed: int = 0, **options: Any) -> None:
        masking, rest = split_options(options, AdaHATPlugin, AdaHAT)
        super().__init__(
            model=model, optimizer=optimizer, masking=AdaHATPlugin(**masking, seed=seed), seed=seed, **rest
        )
