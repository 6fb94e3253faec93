"""Strategies that metrics are tested on: units masked (AmnesiacHAT), weights (WSN), none (stock ones)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from avalanche.evaluation import PluginMetric
from avalanche.logging import BaseLogger
from avalanche.training import EWC
from avalanche.training.plugins import EvaluationPlugin
from torch import nn
from torch.optim import Adam

from avalanche_amnesia.benchmarks import PermutedDigits, with_unlearning
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.models import MLP, MultiHeadModel, SubnetModel
from avalanche_amnesia.training import WSN, AmnesiacHAT
from support.strategies import amnesiac, stock

PERMUTED = PermutedDigits(4, n_train=200, n_test=100)
BENCHMARK = with_unlearning(PERMUTED, {1: [0], 3: [2]})
TEST = BENCHMARK.test_stream


def wide() -> nn.Module:
    return MLP(64, hidden=(32,), features=16)


def make(**options: Any) -> AmnesiacHAT:
    """A strategy for the permuted digits."""
    return amnesiac(net=wide, **{"train_epochs": 3, **options})


def stock_maker(kind: Any, **method: Any) -> Callable[..., Any]:
    """Maker of a stock strategy for the permuted digits."""

    def make_stock(**options: Any) -> Any:
        torch.manual_seed(0)
        return stock(kind, model=MultiHeadModel(wide()), epochs=2, **method, **options)

    return make_stock


def narrow() -> nn.Module:
    return MLP(64, hidden=(24,), features=12)


def make_hat(**options: Any) -> AmnesiacHAT:
    return amnesiac(net=narrow, train_epochs=4, **options)


def make_wsn(**options: Any) -> WSN:
    torch.manual_seed(0)
    model = SubnetModel(narrow(), density=0.3)
    optimizer = Adam(model.parameters(), lr=1e-2)
    return WSN(model=model, optimizer=optimizer, train_mb_size=40, train_epochs=4, eval_mb_size=200, **options)


def make_ewc(**options: Any) -> EWC:
    torch.manual_seed(0)
    return stock(EWC, model=MultiHeadModel(narrow()), epochs=4, ewc_lambda=1.0, **options)


MAKERS = {"hat": make_hat, "wsn": make_wsn, "ewc": make_ewc}
"""Kind → maker of its strategy for split digits."""


def silent(*metrics: PluginMetric | Sequence[PluginMetric]) -> EvaluationPlugin:
    return EvaluationPlugin(*metrics, loggers=[BaseLogger()])


def hashes(model: nn.Module) -> list[tuple[str, str]]:
    return [(name, tensor_hash(value)) for name, value in model.state_dict().items()]
