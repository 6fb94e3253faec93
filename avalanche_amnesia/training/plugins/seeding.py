"""Draws of a task derive from (seed, task): nothing that ran before, and no evaluation, can change them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from avalanche.core import SupervisedPlugin

from avalanche_amnesia import checks
from avalanche_amnesia.seeding import derive_seed

_RngState = tuple[torch.Tensor, list[torch.Tensor], Any, Any]


def _rng_state() -> _RngState:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()  # noqa: NPY002 - the host draws from it


def _set_rng_state(state: _RngState) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
    random.setstate(state[2])
    np.random.set_state(state[3])  # noqa: NPY002


def seed_all(seed: int) -> None:
    """Seed the global random streams of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave the global random streams of torch, Python and numpy as they were."""
    state = _rng_state()
    try:
        yield
    finally:
        _set_rng_state(state)


class SeedingPlugin(SupervisedPlugin):
    """Seeds heads and data order from (seed, task), and keeps evaluations from touching a random stream.

    Put it first in the plugin list of a stock strategy; the strategies of this package bring their own.

    Args:
        seed: what new modules (heads) are drawn from, together with the task.
        order_seed: what everything drawn while a task trains (data order, dropout) derives from; ``seed`` by
            default. References use another one for the noise floor.

    Raises:
        ValueError: for a seed that is no integer.
    """

    def __init__(self, seed: int = 0, order_seed: int | None = None) -> None:
        super().__init__()
        self.seed = checks.whole_number("seed", seed, None)
        self.order_seed = self.seed if order_seed is None else checks.whole_number("order_seed", order_seed, None)
        self._outside: _RngState | None = None
        self._evaluations: list[_RngState] = []

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Remember the caller's random streams."""
        self._outside, self._evaluations = _rng_state(), []

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Seed what the task's modules are drawn from."""
        seed_all(derive_seed(self.seed, "modules", *strategy.experience.task_labels))

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Seed data order and dropout."""
        seed_all(derive_seed(self.order_seed, "order", *strategy.experience.task_labels))

    def after_training(self, strategy: Any, **kwargs: Any) -> None:
        """Give the caller's random streams back."""
        if self._outside is not None:
            _set_rng_state(self._outside)
            self._outside = None

    def before_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Remember the random streams; evaluations may nest (a metric that evaluates)."""
        self._evaluations.append(_rng_state())

    def after_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Put the random streams back."""
        if self._evaluations:
            _set_rng_state(self._evaluations.pop())
