"""Plugin that adds a regression on random features of the inputs to a task's logits."""

from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import TaskError, single_task
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.random_features import fitted_ridge, random_features
from avalanche_amnesia.seeding import derive_seed, preserved_rng
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.task_faults import drawn_positions, samples_at, warn_of_early_stop

_MOST, _SCALE = 5000, 2.0
"""Number of samples of a regression, and the factor of its scores, best of 2, 5, 10 on validation images of five
streams: no stream loses more than .02 points."""
_NEEDS, _OUT = "RandomFeatures needs inputs", "leave RandomFeatures out of plugins, or standardise the inputs"


class RandomFeatures(Plugin):
    """Plugin that adds to the logits of a trained task a ridge regression on random features of the inputs.

    The features are ``ReLU(z R)``, for the layer norm ``z`` of a flattened input and a fixed random ``R``. The
    regression of one-hot labels needs one pass over up to 5000 of the task's samples, and no other task: claims are as
    without the plugin. Twice its scores are added to the logits. It is removed with the task's head. It helps where
    such a regression classifies well by itself, as for images of digits and clothes. A training that stops before its
    last epoch gets no regression, and warns.

    Works with any Avalanche strategy whose model is a :class:`~avalanche_amnesia.models.MultiHeadModel`.

    Args:
        width: number of random features, at least 1. A task takes ``2 (width + 1)`` bytes per class.

    Raises:
        ValueError: for an invalid value.
        TypeError: before a training, for another model.
        TaskError: before a training, if inputs are no floating-point tensor; at its end, if the regression overflows.

    Reference: Rahimi and Recht, Random features for large-scale kernel machines, NeurIPS 2007.
    """

    def __init__(self, width: int = 2000) -> None:
        super().__init__()
        self.width = checks.whole_number("width", width)

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: check the model, and that inputs are one floating-point tensor."""
        check_model(strategy.model, MultiHeadModel)
        if strategy.model.additive:
            raise TypeError(f"{type(strategy).__name__} is such a regression: leave RandomFeatures out of plugins")
        x, _ = self._samples(strategy, 1)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            task, kind = single_task(strategy.experience), x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TaskError(f"{_NEEDS} that are one tensor of floating-point numbers, task {task} has {kind}: {_OUT}")

    def _samples(self, strategy: Strategy, most: int) -> tuple[Any, Tensor]:
        with preserved_rng():
            task = single_task(strategy.experience)
            return samples_at(strategy, drawn_positions(strategy, most, derive_seed(0, "random features", task)))

    @torch.no_grad()
    def after_training_epoch(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's last epoch: fit a regression on random features, and add its scores to the task's logits."""
        if strategy.clock.train_exp_epochs + 1 < strategy.train_epochs:
            return
        task, (x, y) = single_task(strategy.experience), self._samples(strategy, _MOST)
        features = random_features(x.to(strategy.device), self.width)
        ridge = fitted_ridge(features, y.to(strategy.device), strategy.model.heads[task].out_features, _SCALE)
        if not bool(ridge.isfinite().all()):
            raise TaskError(f"{_NEEDS} whose features are finite and vary, unlike those of task {task}: {_OUT}")
        strategy.model.add_regression(task, ridge)

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: warn if it stopped before its last epoch, and so has no regression."""
        if strategy.clock.train_exp_epochs < strategy.train_epochs:
            warn_of_early_stop(self, strategy)
