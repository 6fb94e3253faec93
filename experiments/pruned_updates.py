"""Trajectory plugin that prunes a task's update before recording it, to save memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin


class PrunedTrajectoryPlugin(TrajectoryPlugin):
    """Plugin that records only entries that changed much or in many steps, and resets all other changed entries.

    The reset changes the model, too: unlearning could not remove an update that is not recorded. On our streams this
    saves almost no memory (experiments/results/trajectory_bytes.md), because the entries in a task's mask change much.

    Args:
        threshold: reset entries that the task changed by less than this, above 0; None: reset none.
        min_active_steps: reset entries that changed in less than this share of the task's steps, in (0, 1]; None: reset
            none. Counting needs a copy of the model, a counter of 4 bytes per parameter, and a comparison per step.
        dtype: as for :class:`TrajectoryPlugin`.

    Raises:
        ValueError: invalid value of an option.
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
        """Before a task's training: call the base class's method, and start counting changes per entry."""
        super().before_training_exp(strategy, **kwargs)
        self._activity = None if self.min_active_steps is None else StepActivity(strategy.model)

    def before_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an optimizer step: copy the parameters, if changes are counted."""
        if self._activity is not None:
            self._activity.before_step()

    def after_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """After an optimizer step: count the changed entries, if changes are counted."""
        if self._activity is not None:
            self._activity.after_step()

    def prune(self, before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Reset entries with a small change, or with changes in few steps, to their values ``before`` the task."""
        active = {} if self._activity is None else self._activity.share()
        for name, parameter in parameters.items():
            if name not in before or before[name].shape != parameter.shape:  # recording raises an error for these
                continue
            old = before[name].to(parameter.device)
            returns = torch.zeros_like(parameter, dtype=torch.bool)
            if self.threshold is not None:
                returns |= (parameter.double() - old.double()).abs() < self.threshold
            if self.min_active_steps is not None:
                returns |= active[name] < self.min_active_steps
            parameter.copy_(torch.where(returns, old, parameter))

    def undo_training(self, strategy: Strategy) -> None:
        """After an interrupted training: call the base class's method, and delete the counts."""
        super().undo_training(strategy)
        self._activity = None


class StepActivity:
    """Counter of the optimizer steps of a task that changed each entry of each parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._moves = {n: torch.zeros_like(p, dtype=torch.int32) for n, p in self._parameters.items()}
        self._start = {n: torch.empty_like(p, requires_grad=False) for n, p in self._parameters.items()}
        self._steps = 0

    @torch.no_grad()
    def before_step(self) -> None:
        """Copy all parameters, so that changes between two steps (e.g. by an unlearning) are not counted."""
        for name, parameter in self._parameters.items():
            self._start[name].copy_(parameter)

    @torch.no_grad()
    def after_step(self) -> None:
        """Count the step for each entry that it changed."""
        self._steps += 1
        for name, parameter in self._parameters.items():
            self._moves[name] += ~same_bits(parameter, self._start[name])

    def share(self) -> dict[str, Tensor]:
        """Return parameter name → share of the steps that changed each entry, float64 in the parameter's shape."""
        return {name: moves.double() / max(self._steps, 1) for name, moves in self._moves.items()}
