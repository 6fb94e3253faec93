"""Replayed samples of earlier tasks run through their own masks, and their gradients are held back in every step."""

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import ReplayPlugin
from support.strategies import trained

from avalanche_amnesia import HAT


class WatchEarlier(SupervisedPlugin):
    """Counts steps with a gradient in what earlier tasks use, and with a change of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = self.moved = 0

    def before_training_exp(self, strategy, **kwargs):
        model = strategy.model
        self.used = {
            name: reads.expand(model.get_parameter(name).shape)
            for task in model.masked_tasks
            for name, reads in model.entries_of(task)
        }
        self.before = {name: model.get_parameter(name).detach().clone() for name in self.used}

    def after_backward(self, strategy, **kwargs):
        gradients = ((strategy.model.get_parameter(name).grad, used) for name, used in self.used.items())
        self.reached += any(gradient is not None and bool(gradient[used].any()) for gradient, used in gradients)

    def after_update(self, strategy, **kwargs):
        now = {name: strategy.model.get_parameter(name).detach() for name in self.used}
        self.moved += any(not torch.equal(now[name][used], self.before[name][used]) for name, used in self.used.items())


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.05), lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-3)],
    ids=["sgd", "adam"],
)
def test_replayed_samples_move_nothing_of_their_tasks(optimizer):
    watch = WatchEarlier()
    options = {"hidden": (40,), "features": 30, "optimizer": optimizer, "train_mb_size": 20}
    trained(2, kind=HAT, isolation="pools", plugins=[ReplayPlugin(mem_size=60), watch], **options)
    assert watch.reached > 5
    assert watch.moved == 0
