"""WSN: winning subnetworks that can forget a task on request."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from avalanche_amnesia.models.weight_masks.subnet import SubnetModel
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin, recorder_of
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.plugins.wsn import SubnetPlugin
from avalanche_amnesia.training.task_strategy import HardAttentionStrategy, split_options


class WSN(HardAttentionStrategy):
    """Winning subnetworks: a task uses the best-scored weights of each layer; those of earlier tasks are frozen.

    Requests come with the experiences (:func:`~avalanche_amnesia.benchmarks.with_unlearning`) or from
    :meth:`~HardAttentionStrategy.unlearn`. What a forgotten task alone used returns to its initial bits. Weights that
    it trained and a remaining task uses stay as they are, so that no remaining task's logits change by a bit; the
    record lists them (``record.plan.shared``), and calls itself approximate. Scores go back to those before the first
    forgotten task.

    Args:
        model: a :class:`SubnetModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        keep_probes: whether metrics may keep the masks and heads of tasks that the stream's requests name.
        deadline: a task becomes permanent once this many further tasks have been trained; by default the stream's.
        trajectory: how updates are kept, ``TrajectoryPlugin(threshold=…, dtype=…, path=…)``; by default all of them,
            lossless, in memory.
        allow_unknown: unlearn although a plugin keeps learned state that no purger can clean; the record says so.
        seed: every draw derives from it and the task.
        options: those of :class:`SubnetPlugin` (``scores``, ``score_init``, ``score_lr``, ``keep`` …) and of
            :class:`HardAttentionStrategy` (``train_mb_size``, ``train_epochs``, ``plugins``, ``evaluator`` …).

    Raises:
        TypeError: for an unknown option.
        ValueError: for a value that is not allowed.

    Reference: Kang et al., Forget-free continual learning with winning subnetworks, ICML 2022.
    """

    def __init__(
        self,
        *,
        model: SubnetModel,
        optimizer: Optimizer,
        keep_probes: bool = True,
        deadline: int | None = None,
        trajectory: TrajectoryPlugin | None = None,
        allow_unknown: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        masking, rest = split_options(options, SubnetPlugin, WSN)
        super().__init__(
            model=model,
            optimizer=optimizer,
            masking=SubnetPlugin(**masking, seed=seed),
            unlearning=[
                recorder_of(trajectory),
                UnlearningPlugin(keep_probes=keep_probes, deadline=deadline, allow_unknown=allow_unknown),
            ],
            seed=seed,
            **rest,
        )
