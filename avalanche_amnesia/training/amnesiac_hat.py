"""AmnesiacHAT: hard attention that can forget a task on request."""

from __future__ import annotations

from typing import Any, Literal

from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.contrib.ablations.scaled_updates import ScaledUpdatesPlugin
from avalanche_amnesia.contrib.repair.repair_plugin import RepairPlugin
from avalanche_amnesia.contrib.shadows.backup_plugin import BackupPlugin
from avalanche_amnesia.models.allocation import Isolation
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.training.hard_attention import HardAttention
from avalanche_amnesia.training.plugins.adahat import AdaHATPlugin
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.hat import HATPlugin, IsolationChoice
from avalanche_amnesia.training.plugins.shared_counterfactual import SharedHeadCounterfactualPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin, recorder_of
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import HardAttentionStrategy, split_options
from avalanche_amnesia.training.update_rules import AdjustmentRule
from avalanche_amnesia.unlearning.compensation import Compensation

AmnesiacAdjustment = Literal["hat", "adahat", "random", "constant"]
DeletionChoice = Literal["updates", "exclusive"]
CompensationChoice = Literal["none", "draft", "rate", "backup", "counterfactual"]
RepairChoice = Literal["none", "joint", "sequential", "sequential_adahat"]


class AmnesiacHAT(HardAttentionStrategy):
    """HAT or AdaHAT that records what each task changed and unlearns tasks on request.

    A parameter is ``θ^(t) = θ^(0) + Σ_τ Δ^(τ)``; unlearning task τ takes ``Δ^(τ)`` out, compensates the remaining tasks
    for the loss (by choice), and purges everything else that was the task's.

    Requests come with the experiences (:func:`~avalanche_amnesia.benchmarks.with_unlearning`) or from
    :meth:`~HardAttentionStrategy.unlearn`.

    Args:
        model: a :class:`MaskedModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        masks: settings of learning a mask. By default ``HardAttention(budget="even", s_max=100,
            embedding_lr=0.02)``: a task takes its share of what is free, so that masks fit two tasks or two hundred,
            and what an unlearning gives back goes to the tasks to come. Under a head that all tasks share,
            and where ``sparsity_weight`` or ``sparsity`` is named beside, a regulariser of ``sparsity_weight=0.5`` or
            the one named in place of the budget. The published ones are ``HardAttention()``.
        adjustment: an :class:`~avalanche_amnesia.training.update_rules.AdjustmentRule`, such as
            ``AdaHATRule(alpha=1e-2)``, or its name, ``hat``, ``adahat``, ``random`` or ``constant``. Under ``hat``
            (default) parameters in use are frozen, so that an unlearning never touches tasks learned before the one
            that goes, unless ``locked`` left them open to it.
        deletion: ``updates`` takes out all that the task wrote; ``exclusive``, HAT-CL's way and kept for comparison,
            returns only what no remaining task uses to its initial bits: no remaining task's logits change, and what
            the task taught the units that others share stays (``record.plan.shared``).
        compensation: what makes up to tasks that were learned on top of one that goes: ``counterfactual`` (heads fitted
            in advance, :class:`CounterfactualPlugin`), ``backup`` (shadow copies, :class:`BackupPlugin`), the ablations
            ``rate`` and ``draft`` (:class:`ScaledUpdatesPlugin`), ``none``, or one of these plugins with options of its
            own, ``BackupPlugin(start="delete")``. One alone: each is made for what the others leave as it is.
        repair: a few steps for the affected tasks on a few samples of theirs, which are held for it: ``none`` (default:
            no data is kept), or the mode of a :class:`RepairPlugin`; a plugin of your own for its options.
        keep_probes: whether metrics may keep the masks and heads of tasks that the stream's requests name.
        deadline: a task becomes permanent once this many further tasks have been trained; by default the stream's.
        trajectory: how updates are kept, ``TrajectoryPlugin(threshold=…, dtype=…, path=…)``; by default all of them,
            lossless, in memory.
        allow_unknown: unlearn although a plugin keeps learned state that no purger can clean; the record says so.
        isolation: ``none``, ``pools`` or :class:`~avalanche_amnesia.isolation.Pools` with options of its own: units
            for each task alone, which makes unlearning exact to the bit.
        seed: every draw derives from it and the task.
        fit_head: whether a task's head is fitted anew when the task ends, by logistic regression on the features of
            its training samples through its final mask, as the heads of ``counterfactual`` are: the model, the one
            that never unlearned, and the retrained one then differ in what was learned and not in how well heads fit.
        options: single settings of ``masks``; those of :class:`HATPlugin` or :class:`AdaHATPlugin` (``locked``,
            ``space``, ``alpha`` …); those of :class:`HardAttentionStrategy` (``train_mb_size``, ``plugins`` …).

    Raises:
        TypeError: for an unknown option.
        ValueError: for a value that is not allowed.
    """

    def __init__(
        self,
        *,
        model: MaskedModel,
        optimizer: Optimizer,
        masks: HardAttention | None = None,
        adjustment: AmnesiacAdjustment | AdjustmentRule = "hat",
        deletion: DeletionChoice = "updates",
        compensation: CompensationChoice | Compensation = "counterfactual",
        repair: RepairChoice | RepairPlugin = "none",
        keep_probes: bool = True,
        deadline: int | None = None,
        trajectory: TrajectoryPlugin | None = None,
        allow_unknown: bool = False,
        isolation: Isolation | IsolationChoice = "none",
        fit_head: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        checks.one_of("deletion", deletion, DeletionChoice)
        if not isinstance(adjustment, AdjustmentRule):
            checks.one_of("adjustment", adjustment, AmnesiacAdjustment)
        if not isinstance(repair, RepairPlugin):
            checks.one_of("repair", repair, RepairChoice)
        one_head = getattr(model, "shared_head", None) is not None
        if masks is None:
            # Under one head a task must be free to close units in use: their columns are other tasks', and frozen.
            priced = one_head or not options.keys().isdisjoint({"sparsity_weight", "sparsity"})
            weight = 0.5 if priced and isolation == "none" else None
            budget: Literal["even"] | None = None if priced else "even"
            masks = HardAttention(budget=budget, sparsity_weight=weight, s_max=100.0, embedding_lr=0.02)
        kind = AdaHATPlugin if adjustment == "adahat" else HATPlugin
        of_masking, rest = split_options(options, kind, AmnesiacHAT)
        if adjustment != "adahat":
            of_masking["adjustment"] = adjustment
        masking = kind(masks=masks, isolation=isolation, fit_head=fit_head, seed=seed, **of_masking)
        shared = one_head and deletion == "updates"
        if shared and repair != "none":
            raise ValueError("a shared head can't be repaired: its columns serve every task; leave repair= out")
        super().__init__(
            model=model,
            optimizer=optimizer,
            masking=masking,
            unlearning=[
                recorder_of(trajectory),
                *_compensations(compensation, seed, shared),
                *_repair_plugin(repair, seed),
                UnlearningPlugin(keep_probes=keep_probes, deadline=deadline, allow_unknown=allow_unknown),
            ],
            seed=seed,
            **rest,
        )
        model.keeps_shared_entries = deletion == "exclusive"


def _compensations(chosen: CompensationChoice | Compensation, seed: int, shared_head: bool) -> list[Any]:
    if isinstance(chosen, Compensation):
        return [chosen]
    checks.one_of("compensation", chosen, CompensationChoice)
    if chosen == "none":
        return []
    if chosen == "counterfactual":
        return [SharedHeadCounterfactualPlugin(seed=seed) if shared_head else CounterfactualPlugin(seed=seed)]
    return [BackupPlugin(seed=seed) if chosen == "backup" else ScaledUpdatesPlugin(chosen)]


def _repair_plugin(repair: RepairChoice | RepairPlugin, seed: int) -> list[RepairPlugin]:
    if isinstance(repair, RepairPlugin):
        return [repair]
    return [] if repair == "none" else [RepairPlugin(repair, seed=seed)]
