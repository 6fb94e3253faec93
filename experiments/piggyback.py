"""Piggyback: example of a user's own mask method in one file; tasks learn masks over a frozen backbone.

    python -m experiments.piggyback

Every task learns a real-valued score for each weight of a frozen backbone, and uses the weights with a score above a
threshold; gradients pass straight through the threshold. A task consists only of its binary mask and its head, so any
task can be unlearned exactly.

Reference: Mallya et al., Piggyback: adapting a single network to multiple tasks by learning to mask weights, ECCV 2018.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.models import MLP, SubnetModel
from avalanche_amnesia.training import (
    AdjustmentRule,
    TaskInTraining,
    TaskMaskPlugin,
    TaskStrategy,
    TrajectoryPlugin,
    UnlearningPlugin,
)


class PiggybackModel(SubnetModel):
    """Multi-head model with a frozen backbone, and one mask per task over the backbone's weights.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``, preferably pretrained. Parameters with one
            dimension (biases, norms) are not masked.
        n_features: width of the features; by default ``backbone.features``.

    Raises:
        ModelError: as for :class:`SubnetModel`.
    """

    threshold = 5e-3

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        for parameter in backbone.parameters():
            if parameter.dim() == 1:
                parameter.requires_grad_(False)  # SubnetModel masks only trainable parameters
        super().__init__(backbone, density=1.0, bias="masked", n_features=n_features)
        backbone.requires_grad_(False)

    def choose(self, scores: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the mask that ``scores`` determine, float ``(n_weights,)``: 1 above the threshold, else 0."""
        return torch.gt(scores, self.threshold, out=torch.empty_like(scores) if out is None else out)

    def straight_through(self, of_mask: Tensor, scores: Tensor) -> Tensor:
        """Return the mask's gradient ``of_mask`` as the gradient of the scores, ignoring the threshold."""
        return of_mask


class FixedWeights(AdjustmentRule):
    """Adjustment rule that lets no task change any weight of the backbone."""

    def protected_share(self, use: Any, name: str, sparsity: Any) -> Tensor:
        """Return 1 everywhere: undo all updates."""
        return torch.ones_like(use.covered[name])


class PiggybackTask(TaskInTraining):
    """Task in training, with the optimizer of its scores."""

    score_optimizer: Adam


class PiggybackPlugin(TaskMaskPlugin):
    """Plugin that trains the masks of a :class:`PiggybackModel`.

    Args:
        score_lr: learning rate of the scores, above 0. Each task's scores have a new Adam optimizer.
        seed: seed of all random numbers, together with the task.
    """

    model_class = PiggybackModel
    task_class = PiggybackTask

    def __init__(self, *, score_lr: float = 1e-3, seed: int = 0) -> None:
        super().__init__(FixedWeights(), seed)
        self.score_lr = score_lr
        self.influences = frozenset()  # a task's training depends on no other task

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Create the task's scores, above the threshold: all weights are used."""
        now, model = self.in_training, self.model_of(strategy)
        self.take_snapshot(strategy)
        model.start_task(now.task, torch.full((model.n_weights,), 2 * model.threshold))
        now.adjuster = self.make_adjuster(model, self.task_use(model))
        now.score_optimizer = Adam([model.scores], lr=self.score_lr)

    def before_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Compute the mask from the current scores."""
        self.model_of(strategy).choose_weights()

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """Compute the gradients of the scores."""
        self.model_of(strategy).pass_gradients()

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Restore the backbone, and take an optimizer step for the scores."""
        self.restore_protected_entries(self.model_of(strategy))
        self.in_training.score_optimizer.step()

    def keep_mask(self, strategy: Any) -> None:
        """Store the mask, and delete the scores."""
        self.commit(strategy)
        self.model_of(strategy).finish_task(keep_scores=False)


class Piggyback(TaskStrategy):
    """Strategy Piggyback, with unlearning on request.

    Args:
        model: a :class:`PiggybackModel`.
        optimizer: any torch optimizer over ``model.parameters()``; it trains the heads.
        score_lr: learning rate of the scores, above 0.
        seed: seed of all random numbers, together with the task.
        options: further arguments of :class:`TaskStrategy`.
    """

    def __init__(
        self, *, model: PiggybackModel, optimizer: Optimizer, score_lr: float = 1e-3, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(
            model=model,
            optimizer=optimizer,
            method=[PiggybackPlugin(score_lr=score_lr, seed=seed), TrajectoryPlugin(), UnlearningPlugin()],
            seed=seed,
            **options,
        )


def main() -> None:
    """Train split digits with a random backbone, print accuracies, then unlearn the second task."""
    torch.manual_seed(0)
    benchmark, model = SplitDigits(), PiggybackModel(MLP(64, hidden=(256,), features=64))
    strategy = Piggyback(model=model, optimizer=Adam(model.parameters(), lr=1e-3), train_mb_size=32, train_epochs=5)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    model.eval()
    for experience in benchmark.test_stream:
        x, y = task_data(experience)
        used = mean(float(part.float().mean()) for part in model.masks[experience.task_label].values())
        found = accuracy(model(x, experience.task_label), y)
        print(f"task {experience.task_label}: accuracy {found:.3f}, {used:.0%} of the weights in use")
    print(f"task 1 unlearned: {strategy.unlearn([1]).plan.claim}")


if __name__ == "__main__":
    main()
