"""AmnesiacHAT: hard attention that can forget a task on request."""

from __future__ import annotations

from typing import Any, Literal

from torch.optim import Optimizer

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training.attention import check_choice
from avalanche_amnesia.training.hard_attention import HardAttentionStrategy, split_options, takes_options_of
from avalanche_amnesia.training.plugins import (
    AdaHATPlugin,
    CounterfactualPlugin,
    HATPlugin,
    RepairPlugin,
    TrajectoryPlugin,
    UnlearningPlugin,
)

AmnesiacAdjustment = Literal["hat", "adahat", "random", "constant"]
CompensationChoice = Literal["none", "counterfactual"]
RepairChoice = Literal["none", "joint", "sequential", "sequential_adahat"]


class AmnesiacHAT(HardAttentionStrategy):
    """HAT or AdaHAT that records what each task changed and unlearns tasks on request (METHOD §6).

    Requests come with the experiences (:func:`~avalanche_amnesia.benchmarks.with_unlearning`) or from
    :meth:`~HardAttentionStrategy.unlearn`.

    Args:
        model: a :class:`MaskedModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        adjustment: ``hat`` (default: parameters in use are frozen, so that an unlearning never touches tasks learned
            before the one that goes, unless ``locked`` left them open to it), ``adahat``, ``random`` or ``constant``.
        compensation: what makes up to tasks that were learned on top of one that goes: ``counterfactual`` (heads fitted
            in advance, :class:`CounterfactualPlugin`) or ``none``.
        repair: a few steps for the affected tasks on a few samples of theirs, which are held for it: ``none`` (default:
            no data is kept), or the mode of a :class:`RepairPlugin`; a plugin of your own for its options.
        keep_probes: whether metrics may keep the masks and heads of tasks that the stream's requests name.
        deadline: a task becomes permanent once this many further tasks have been trained; by default the stream's.
        trajectory: how updates are kept, ``TrajectoryPlugin(threshold=…, dtype=…, path=…)``; by default all of them,
            lossless, in memory.
        seed: every draw derives from it and the task.
        options: those of :class:`HATPlugin` or :class:`AdaHATPlugin` and of :class:`HardAttentionStrategy`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for a value that is not allowed.
    """

    @takes_options_of(HATPlugin, AdaHATPlugin)
    def __init__(
        self,
        *,
        model: MaskedModel,
        optimizer: Optimizer,
        adjustment: AmnesiacAdjustment = "hat",
        compensation: CompensationChoice = "counterfactual",
        repair: RepairChoice | RepairPlugin = "none",
        keep_probes: bool = True,
        deadline: int | None = None,
        trajectory: TrajectoryPlugin | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_choice("adjustment", adjustment, AmnesiacAdjustment)
        check_choice("compensation", compensation, CompensationChoice)
        if not isinstance(repair, RepairPlugin):
            check_choice("repair", repair, RepairChoice)
        masking: HATPlugin
        if adjustment == "adahat":
            of_plugin, rest = split_options(options, AdaHATPlugin)
            masking = AdaHATPlugin(**of_plugin, seed=seed)
        else:
            of_plugin, rest = split_options(options, HATPlugin)
            masking = HATPlugin(**of_plugin, adjustment=adjustment, seed=seed)
        super().__init__(
            model=model,
            optimizer=optimizer,
            masking=masking,
            unlearning=[
                TrajectoryPlugin() if trajectory is None else trajectory,
                *([CounterfactualPlugin(seed=seed)] if compensation == "counterfactual" else []),
                *_repair_plugin(repair, seed),
                UnlearningPlugin(keep_probes=keep_probes, deadline=deadline),
            ],
            seed=seed,
            **rest,
        )


def _repair_plugin(repair: RepairChoice | RepairPlugin, seed: int) -> list[RepairPlugin]:
    if isinstance(repair, RepairPlugin):
        return [repair]
    return [] if repair == "none" else [RepairPlugin(repair, seed=seed)]
