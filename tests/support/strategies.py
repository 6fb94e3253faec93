"""The small strategies that tests make, train and look at."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from avalanche.core import SupervisedPlugin
from avalanche.evaluation import PluginMetric
from avalanche.logging import BaseLogger
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from avalanche_amnesia import AnalyticModel, DisjointModel, DisjointSubnets, RanPAC
from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent, NetworkPerTask, SideNetworks
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel, SubnetModel
from avalanche_amnesia.processes import rank
from avalanche_amnesia.training import EVEN_BUDGET, WSN, AmnesiacHAT
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

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


class NormedConvNet(nn.Module):
    """With a BatchNorm and a LayerNorm, and no ReLU after the last one."""

    features = 12

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.last = nn.Conv2d(6, 8, 3, stride=2), nn.Linear(8 * 9, 12)
        self.layer_norm, self.drop = nn.LayerNorm(12), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return self.layer_norm(torch.relu(self.last(self.drop(x.flatten(1)))))


class BatchNormedConvNet(nn.Module):
    """With a BatchNorm, no dropout, and kernels of 1×1, because their strides do not determine a layout."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.third = nn.Conv2d(6, 10, 3, stride=2), nn.Conv2d(10, 8, 1)
        self.fourth = nn.Linear(8 * 9, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.third(torch.relu(self.second(torch.relu(self.norm(self.first(x)))))))
        return torch.relu(self.fourth(torch.flatten(x, 1)))


class TwoNorms(nn.Module):
    """Convolutions, each with a norm of the given kind."""

    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3, padding=1), norm(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 12, 3, padding=1), norm(12)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        return nn.functional.adaptive_avg_pool2d(torch.relu(self.norm2(self.conv2(x))), 2).flatten(1)


def batch_normed(pooled: int = 1) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(pooled), nn.Flatten()),
    )


def quiet(*metrics: PluginMetric | Sequence[PluginMetric]) -> EvaluationPlugin:
    """An evaluator that prints nothing."""
    return EvaluationPlugin(*metrics, loggers=[] if rank() else [BaseLogger()])


class RunningScale(nn.Module):
    """A loss divided by its running mean, which changes the next task's training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits, y)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean


class Hears(SupervisedPlugin):
    """Calls functions with the strategy at the host's events: ``Hears(after_update=function)``."""

    def __init__(self, **functions: Callable[[Any], object]) -> None:
        super().__init__()
        for event, function in functions.items():
            setattr(self, event, lambda strategy, function=function, **kwargs: function(strategy))


def feed_in() -> SupervisedPlugin:
    """Hands the network its inputs in its own precision."""

    def convert(strategy: Any) -> None:
        if strategy.mb_x.is_floating_point():
            strategy.mbatch[0] = strategy.mb_x.to(next(strategy.model.backbone.parameters()).dtype)

    return Hears(before_training_iteration=convert)


class NoMetric(PluginMetric):
    """Of no value: what else a metric does is a test's own."""

    def result(self, **kwargs: Any) -> None:
        return None

    def reset(self, **kwargs: Any) -> None:
        pass


WRAPS = {
    WSN: SubnetModel,
    PALL: SubnetModel,
    DisjointSubnets: DisjointModel,
    Independent: NetworkPerTask,
    CLPUDERpp: SideNetworks,
    Naive: MultiHeadModel,
}
"""Model of a strategy's backbone where it is no MaskedModel."""

PRICED = replace(EVEN_BUDGET, budget=None, sparsity_weight=0.5)
"""Masks under a regulariser, in place of AmnesiacHAT's budget."""


def with_plugins(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a strategy, with its plugins made where functions that make them stand: each has its own."""
    plugins = ("compensation", "repair", "trajectory", "unlearning", "plugins", "evaluator")
    return {name: value() if name in plugins and callable(value) else value for name, value in options.items()}


def make(
    kind: Any = AmnesiacHAT,
    *,
    hidden: Any = (24,),
    features: int = 16,
    net: Any = None,
    wrap: Any = None,
    model: Any = None,
    optimizer: Any = "adam",
    torch_seed: int = 0,
    **options: Any,
) -> Any:
    """A strategy on a small network.

    Args:
        kind: class of the strategy.
        hidden: widths of the backbone's hidden layers, an MLP's over the 64 pixels of a digit.
        features: width of its last layer.
        net: maker of another backbone.
        wrap: maker of the model around the backbone, by default the one that the strategy needs.
        model: in place of what ``net`` and ``wrap`` make.
        optimizer: name in ``OPTIMIZERS``, or a function of the parameters.
        torch_seed: seed of torch for the model's initial values.
        options: of the strategy.
    """
    if model is None:
        torch.manual_seed(torch_seed)
        backbone = MLP(64, hidden=hidden, features=features) if net is None else net()
        model = (WRAPS.get(kind, MaskedModel) if wrap is None else wrap)(backbone)
    factory = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    options = {"train_mb_size": 40, "train_epochs": 2, "eval_mb_size": 200, **with_plugins(options)}
    if kind is Naive:
        options.setdefault("evaluator", quiet())
    return kind(model=model, optimizer=factory(model.parameters()), **options)


def ranpac(hidden: Any = (24,), **options: Any) -> RanPAC:
    """A RanPAC over a frozen MLP with random weights."""
    torch.manual_seed(0)
    model = AnalyticModel(MLP(64, hidden=hidden, features=16), projection=40, ridge=1.0)
    return RanPAC(model=model, **{"train_mb_size": 40, "eval_mb_size": 200, "evaluator": quiet(), **options})


def amnesiac(**options: Any) -> AmnesiacHAT:
    """An AmnesiacHAT; ``options`` are those of :func:`make`."""
    return make(AmnesiacHAT, **options)


def brief(**options: Any) -> AmnesiacHAT:
    """An AmnesiacHAT that trains each task for one epoch."""
    return amnesiac(**{"train_epochs": 1, **options})


T = TypeVar("T")


def learn(strategy: T, stream: Any, tasks: int | Iterable[int] | None = None, **options: Any) -> T:
    """Train a strategy on tasks of a stream, one ``train`` each, and return it.

    Args:
        strategy: that has a ``train``.
        stream: experiences, or a benchmark.
        tasks: how many of the first ones, or which; None: all.
        options: of every ``train``.
    """
    stream = getattr(stream, "train_stream", stream)
    if isinstance(tasks, int):
        stream = stream[:tasks]
    for experience in stream if tasks is None or isinstance(tasks, int) else [stream[task] for task in tasks]:
        strategy.train(experience, **options)
    return strategy


def trained(tasks: int | Iterable[int] | None = None, stream: Any = DIGITS, maker: Any = make, **options: Any) -> Any:
    """A strategy, by default an AmnesiacHAT, that has learned tasks of a stream: ``options`` are those of its maker.

    It is trained once for the same plain arguments, and copied.
    """
    plain = all(isinstance(value, (str, int, float, type(None))) for value in options.values())
    if stream is DIGITS and isinstance(tasks, int) and plain:
        return copy.deepcopy(_trained(tasks, maker, **options))
    return learn(maker(**options), stream, tasks)


@functools.cache
def _trained(tasks: int, maker: Any, **options: Any) -> Any:
    return learn(maker(**options), DIGITS, tasks)


@torch.no_grad()
def logits(of: Any, experience: Any) -> Tensor:
    """Logits of an experience's data, of a model or of a strategy's, in evaluation mode."""
    model, (x, _) = getattr(of, "model", of), task_data(experience)
    training = model.training
    x = x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
    found: Tensor = model.eval()(x, experience.task_label)
    model.train(training)
    return found


def accuracy(of: Any, experience: Any) -> float:
    """Share of an experience's data that a model, or a strategy's, classifies rightly."""
    return float((logits(of, experience).argmax(1) == task_data(experience)[1]).double().mean())


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
