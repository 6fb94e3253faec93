"""AmnesiacHAT: the hard attention strategy (HAT) that unlearns tasks on request."""

from typing import Any, Literal, Unpack

from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.strategy import Plugin
from avalanche_amnesia.training.hard_attention import EVEN_BUDGET, HardAttention
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.training.update_rules import AdaHATRule, AdjustmentRule
from avalanche_amnesia.unlearning.compensation import Compensation, is_compensation, is_repair

CompensationChoice = Literal["counterfactual", "none"]


class AmnesiacHAT(TaskStrategy):
    """Strategy HAT or AdaHAT that records each task's update (change of the weights) and unlearns tasks on request.

    A parameter is ``θ^(t) = θ^(0) + Σ_τ Δ^(τ)``; unlearning task τ removes ``Δ^(τ)``, compensates the remaining tasks
    for the loss (by choice), and purges all further data of the task.

    Requests come with the experiences (:func:`~avalanche_amnesia.benchmarks.with_unlearning`) or from
    :meth:`~TaskStrategy.unlearn`.

    Args:
        model: a :class:`MaskedModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        masks: settings of learning a mask. By default ``EVEN_BUDGET``, that is ``HardAttention(budget="even",
            s_max=100, embedding_lr=0.02, fit_head=True)``: a task takes its share of the free units, so that masks fit
            two tasks or two hundred, and later tasks reuse the units of unlearned tasks. ``HardAttention()`` has the
            published settings.
        adjustment: ``hat`` (default), ``adahat``, ``random``, ``constant``, or an
            :class:`~avalanche_amnesia.training.update_rules.AdjustmentRule`, such as ``AdaHATRule(alpha=1e-2)``. Under
            ``hat`` parameters in use are frozen, so that an unlearning never changes tasks learned before the unlearned
            one, unless the rule's ``locked`` leaves them unprotected.
        compensation: replacement for tasks that were trained after an unlearned one: ``counterfactual`` (heads fitted
            in advance, a :class:`CounterfactualPlugin`), ``none``, or a plugin, such as
            :class:`~avalanche_amnesia.contrib.shadows.BackupPlugin` (shadow copies).
        repair: a few steps for the affected tasks on their samples, which are stored for it: a
            :class:`~avalanche_amnesia.contrib.repair.RepairPlugin`. None (default): no data is stored.
        trajectory: how updates are stored, ``TrajectoryPlugin(dtype=…)``; by default all of them, lossless.
        unlearning: how requests are obeyed, ``UnlearningPlugin(deadline=…, keep_probes=…, deletion=…)``.
        seed: every random draw derives from it and the task.
        options: ``reset_optimizer`` and Avalanche's own, as of :class:`TaskStrategy`.

    Raises:
        TypeError: for an unknown option, or an object of another kind.
        ValueError: for an invalid value.
    """

    def __init__(
        self,
        *,
        model: MaskedModel,
        optimizer: Optimizer,
        masks: HardAttention | None = None,
        adjustment: str | AdaHATRule | AdjustmentRule = "hat",
        compensation: CompensationChoice | Compensation = "counterfactual",
        repair: Plugin | None = None,
        trajectory: TrajectoryPlugin | None = None,
        unlearning: UnlearningPlugin | None = None,
        seed: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        masking = HATPlugin(masks=masks or EVEN_BUDGET, adjustment=adjustment, seed=seed)
        forgetting = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        if compensation == "counterfactual":
            compensation = CounterfactualPlugin(seed=seed)
        elif compensation != "none" and not is_compensation(compensation):
            allowed = "'counterfactual', 'none' or a plugin (BackupPlugin())"
            raise ValueError(f"compensation must be {allowed}, got {compensation!r}")
        if repair is not None and not is_repair(repair):
            raise TypeError(f"repair must be a repairing plugin or None: contrib.repair.RepairPlugin(); got {repair!r}")
        recorder = checks.object_of("trajectory", trajectory, TrajectoryPlugin, "TrajectoryPlugin(dtype=...)")
        chosen: list[Any] = [compensation if compensation != "none" else None, repair]
        super().__init__(
            model=model,
            optimizer=optimizer,
            method=[masking, recorder, *(plugin for plugin in chosen if plugin is not None), forgetting],
            seed=seed,
            **options,
        )
