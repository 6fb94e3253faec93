"""Pruning of a task's update before it is recorded: small entries, and entries that moved in few steps, return."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin


class PrunedTrajectoryPlugin(TrajectoryPlugin):
    """Records only entries that a task moved far, or in many steps; the others return to their value before it.

    They return in the model too, when the task ends: what a log does not hold would otherwise be residue. On our
    streams it saves hardly a byte (experiments/results/trajectory_bytes.md): what a mask owns moved far.

    Args:
        threshold: entries that a task moved by less than this return, above 0; None: none does.
        min_active_steps: entries that moved in less than this share of the task's steps return, in (0, 1]; None: none
            does. Counting takes a copy of the model, a counter of 4 bytes per parameter, and a comparison per step.
        dtype: as of :class:`TrajectoryPlugin`.

    Raises:
        ValueError: for an option that is not allowed.
    """

    def __init__(
        self,
        *,
        threshold: float | None = None,
        min_active_steps: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if threshold is not None:
            checks.above("threshold", threshold, 0)
        if min_active_steps is not None and not 0 < min_active_steps <= 1:
            raise ValueError(
                "min_active_steps must be a share of a task's steps, above 0 and at most 1, or None to keep every "
                f"entry; got {min_active_steps!r}"
            )
        super().__init__(dtype=dtype)
        self.threshold, self.min_active_steps = threshold, min_active_steps
        self._activity: StepActivity | None = None

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """As the base class's; begin to count moves."""
        super().before_training_exp(strategy, **kwargs)
        self._activity = None if self.min_active_steps is None else StepActivity(strategy.model)

    def before_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """Note where the step starts."""
        if self._activity is not None:
            self._activity.before_step()

    def after_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """Count the entries that the step moved."""
        if self._activity is not None:
            self._activity.after_step()

    def prune(self, before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Return small entries, and those that moved in few steps, to their value before the task."""
        active = {} if self._activity is None else self._activity.share()
        for name, parameter in parameters.items():
            if name not in before or before[name].shape != parameter.shape:  # the record refuses what grew
                continue
            old = before[name].to(parameter.device)
            returns = torch.zeros_like(parameter, dtype=torch.bool)
            if self.threshold is not None:
                returns |= (parameter.double() - old.double()).abs() < self.threshold
            if self.min_active_steps is not None:
                returns |= active[name] < self.min_active_steps
            parameter.copy_(torch.where(returns, old, parameter))

    def undo_training(self, strategy: Strategy) -> None:
        """As the base class's; drop the counts."""
        super().undo_training(strategy)
        self._activity = None


class StepActivity:
    """Count of a task's steps in which each parameter's entries moved."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._moves = {n: torch.zeros_like(p, dtype=torch.int32) for n, p in self._parameters.items()}
        self._start = {n: torch.empty_like(p, requires_grad=False) for n, p in self._parameters.items()}
        self._steps = 0

    @torch.no_grad()
    def before_step(self) -> None:
        """Note where a step starts: what moved since the last one (an unlearning, say) was no step."""
        for name, parameter in self._parameters.items():
            self._start[name].copy_(parameter)

    @torch.no_grad()
    def after_step(self) -> None:
        """Count the entries that the step moved."""
        self._steps += 1
        for name, parameter in self._parameters.items():
            self._moves[name] += ~same_bits(parameter, self._start[name])

    def share(self) -> dict[str, Tensor]:
        """Parameter name → share of the steps in which each entry moved, float64."""
        return {name: moves.double() / max(self._steps, 1) for name, moves in self._moves.items()}
