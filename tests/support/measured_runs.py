"""Strategies that metrics are tested on: units masked (AmnesiacHAT), weights (WSN), none (stock ones)."""

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import EWC

from avalanche_amnesia import MLP, WSN, MultiHeadModel, SubnetModel, UnlearningPlugin, with_unlearning
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.training.host.lookup import find_plugin
from support import strategies
from support.strategies import amnesiac, stock

PERMUTED = PermutedDigits(4, n_train=200, n_test=100)
BENCHMARK = with_unlearning(PERMUTED, {1: [0], 3: [2]})
TEST = BENCHMARK.test_stream


wide = partial(MLP, 64, hidden=(32,), features=16)
make = partial(amnesiac, net=wide, train_epochs=2)
"""Maker of a strategy for the permuted digits."""


narrow = partial(MLP, 64, hidden=(24,), features=12)
make_hat = partial(amnesiac, net=narrow, train_epochs=2)
make_wsn = partial(strategies.make, WSN, net=narrow, wrap=partial(SubnetModel, density=0.3), train_epochs=2)


def make_ewc(**options: Any) -> EWC:
    torch.manual_seed(0)
    return stock(EWC, model=MultiHeadModel(narrow()), epochs=2, ewc_lambda=1.0, **options)


MAKERS = {"hat": make_hat, "wsn": make_wsn, "ewc": make_ewc}
"""Kind → maker of its strategy for split digits."""


class Witness(SupervisedPlugin):
    """Keeps what goes, independently of the metrics: mask and head, and the capacity before."""

    def __init__(self):
        super().__init__()
        self.kept, self.capacities = {}, []

    def before_unlearning(self, strategy, **kwargs):
        for task in find_plugin(strategy, UnlearningPlugin).current.tasks:
            self.kept[task] = self.mask_of(strategy.model, task), deepcopy(strategy.model.head(task))
        self.capacities.append(network_capacity(strategy))

    @staticmethod
    def mask_of(model, task):
        return model.binary_mask(task) if hasattr(model, "binary_mask") else None
