"""Seed the random draws of a task with (seed, task), so that earlier code and evaluations can't change them."""

from typing import Any

from avalanche.core import SupervisedPlugin

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import labels_of
from avalanche_amnesia.seeding import RngState, derive_seed, rng_state, seed_all, set_rng_state
from avalanche_amnesia.strategy import Strategy


class SeedingPlugin(SupervisedPlugin):
    """Plugin that seeds heads and data order with (seed, task), and restores random streams after evaluations.

    Put it first in the plugin list of a stock strategy; the strategies of this package bring their own.

    Args:
        seed: new modules (heads) are drawn from it and the task.
        order_seed: all draws while a task trains (data order, dropout) derive from it and the task; ``seed`` by
            default. References use another one for the noise floor.

    Raises:
        ValueError: for a seed that is no integer.
    """

    seeds_tasks = True

    def __init__(self, seed: int = 0, order_seed: int | None = None) -> None:
        super().__init__()
        self.seed = checks.whole_number("seed", seed, None)
        self.order_seed = self.seed if order_seed is None else checks.whole_number("order_seed", order_seed, None)
        self._outside: RngState | None = None
        self._evaluations: list[RngState] = []

    def before_training(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the training: store the state of the caller's random streams."""
        self._outside, self._evaluations = rng_state(), []

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: seed the initial values of the task's modules."""
        seed_all(derive_seed(self.seed, "modules", *labels_of(strategy.experience)))

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's first step: seed data order and dropout."""
        seed_all(derive_seed(self.order_seed, "order", *labels_of(strategy.experience)))

    def after_training(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the training: restore the state of the caller's random streams."""
        if self._outside is not None:
            set_rng_state(self._outside)
            self._outside = None

    def before_eval(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an evaluation: store the random streams; evaluations may nest (a metric that evaluates)."""
        self._evaluations.append(rng_state())

    def after_eval(self, strategy: Strategy, **kwargs: Any) -> None:
        """After an evaluation: restore the random streams from before it."""
        if self._evaluations:
            set_rng_state(self._evaluations.pop())
