"""Strategies, streams and fingerprints that the tests of unlearning share."""

from dataclasses import replace
from typing import Any

import torch
from avalanche.logging import BaseLogger
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel
from avalanche_amnesia.training import EVEN_BUDGET, AmnesiacHAT
from avalanche_amnesia.training.plugins import SeedingPlugin, TrajectoryPlugin, UnlearningPlugin

DIGITS = SplitDigits(n_train=400, n_test=200)
OPTIMIZERS = {
    "adam": lambda p: Adam(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: SGD(p, lr=0.1),
}


def mlp() -> nn.Module:
    return MLP(64, hidden=(24,), features=16)


class ConvNet(nn.Module):
    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 8, 3, stride=2)
        self.third = nn.Linear(8 * 9, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.relu(self.third(torch.flatten(x, 1)))


def quiet() -> EvaluationPlugin:
    return EvaluationPlugin(loggers=[BaseLogger()])


PRICED = replace(EVEN_BUDGET, budget=None, sparsity_weight=0.5)
"""Masks under a regulariser, in place of AmnesiacHAT's budget."""


def with_plugins(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a strategy, with its plugins made where functions that make them stand: each has its own."""
    plugins = ("compensation", "repair", "trajectory", "unlearning")
    return {name: value() if name in plugins and callable(value) else value for name, value in options.items()}


def amnesiac(*, net=mlp, optimizer="adam", **options: Any) -> AmnesiacHAT:
    torch.manual_seed(0)
    model = MaskedModel(net())
    options = {"train_mb_size": 40, "train_epochs": 2, "eval_mb_size": 200, **with_plugins(options)}
    return AmnesiacHAT(model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), **options)


def trained(n: int, stream: Any = DIGITS.train_stream, **options: Any) -> AmnesiacHAT:
    """A strategy that has learned the first n tasks of a stream."""
    strategy = amnesiac(**options)
    for experience in stream[:n]:
        strategy.train(experience)
    return strategy


def stock(
    make=Naive, *, model=None, plugins=(), unlearning=None, recorder=None, optimizer=None, epochs=5, **options: Any
) -> Any:
    """A stock strategy that forgets on request."""
    torch.manual_seed(0)
    model = MultiHeadModel(MLP(64, hidden=(32,), features=32)) if model is None else model
    return make(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        train_epochs=epochs,
        eval_mb_size=200,
        plugins=[SeedingPlugin(0), recorder or TrajectoryPlugin(), unlearning or UnlearningPlugin(), *plugins],
        **{"evaluator": quiet(), "train_mb_size": 40, **options},
    )
