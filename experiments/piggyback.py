"""Piggyback: a mask method of one's own in one file, over a backbone that no task changes.

    python -m experiments.piggyback

Every task learns real-valued scores over the weights of a fixed backbone, and uses the weights whose score exceeds a
threshold; gradients pass straight through the threshold. A task is its binary mask and its head, so that it is
unlearned exactly, whenever it was learned.

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
    """A backbone that stays as it is, with a mask per task over the weights of its layers, and a head per task.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``, best a trained one. Parameters of one dimension
            (biases, normalisation) stay as they are, unmasked.
        n_features: width of the features; by default ``backbone.features``.

    Raises:
        ModelError: as :class:`SubnetModel`.
    """

    threshold = 5e-3

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        for parameter in backbone.parameters():
            if parameter.dim() == 1:
                parameter.requires_grad_(False)  # what does not learn is not masked
        super().__init__(backbone, density=1.0, bias="masked", n_features=n_features)
        backbone.requires_grad_(False)

    def choose(self, scores: Tensor, out: Tensor | None = None) -> Tensor:
        """The mask that scores choose: 1 above the threshold, else 0, float ``(n_weights,)``."""
        return torch.gt(scores, self.threshold, out=torch.empty_like(scores) if out is None else out)

    def straight_through(self, of_mask: Tensor, scores: Tensor) -> Tensor:
        """Gradient of the scores: that of the mask."""
        return of_mask


class FixedWeights(AdjustmentRule):
    """No weight of the backbone moves, whether a task uses it or not."""

    def protected_share(self, use: Any, name: str, sparsity: float) -> Tensor:
        """All of the update."""
        return torch.ones_like(use.covered[name])


class PiggybackTask(TaskInTraining):
    """A task in training, with the optimizer of its scores."""

    score_optimizer: Adam


class PiggybackPlugin(TaskMaskPlugin):
    """Learns a mask per task over the weights of a :class:`PiggybackModel`.

    Args:
        score_lr: learning rate of the scores, above 0. An Adam of their own steps them, new for every task.
        seed: every draw derives from it and the task.
    """

    model_class = PiggybackModel
    task_class = PiggybackTask

    def __init__(self, *, score_lr: float = 1e-3, seed: int = 0) -> None:
        super().__init__(FixedWeights(), seed)
        self.score_lr = score_lr
        self.influences = frozenset()  # a training reads nothing that another one wrote

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Start the task's scores: all weights are in use."""
        now, model = self.in_training, self.model_of(strategy)
        self.take_snapshot(strategy)
        model.start_task(now.task, torch.full((model.n_weights,), 2 * model.threshold))
        now.adjuster = self.make_adjuster(model, self.task_use(model))
        now.score_optimizer = Adam([model.scores], lr=self.score_lr)

    def before_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Choose the weights of this step."""
        self.model_of(strategy).open_subnet()

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """Hand the gradients on to the scores."""
        self.model_of(strategy).pass_gradients()

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Keep the backbone as it is, whatever the optimizer does; step the scores."""
        self.restore_protected_entries(self.model_of(strategy))
        self.in_training.score_optimizer.step()

    def keep_mask(self, strategy: Any) -> None:
        """Keep the mask; the scores go."""
        self.commit(strategy)
        self.model_of(strategy).finish_task(keep_scores=False)


class Piggyback(TaskStrategy):
    """Piggyback, which unlearns on request.

    Args:
        model: a :class:`PiggybackModel`.
        optimizer: any torch optimizer over ``model.parameters()``; it trains the heads.
        score_lr: learning rate of the scores, above 0.
        seed: every draw derives from it and the task.
        options: those of :class:`TaskStrategy`.
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
    """Learn split digits over a random backbone, then unlearn the second task."""
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
