"""What a training step of each strategy costs, as a ratio to a plain PyTorch step of the same network.

    python -m benchmarks.step_cost [--network mlp|mlp3|resnet18] [--rounds N] [--batch B] [--optimizer sgd|adam]

Every contestant trains MLP 784-256-256, MLP 784-256-100-64 (``mlp3``), or torchvision's ResNet-18 on 32×32 images, on
random mini-batches in one thread through `strategy.train`. Measured is the second task, where half of the units are in
use and protection is on. What one shadow costs is the difference of the two rows of AmnesiacHAT. Two ratios of CPU
time, medians over rounds:

    step   from zeroing gradients to the updated parameters; a plain step runs before each of them, in the same
           process, and the round's figure is the ratio of the two medians
    loop   a whole epoch through Avalanche's loop, data loading and all of its events included, against an epoch of a
           plain loop that indexes tensors
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torchvision
from avalanche.core import SupervisedPlugin
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from torch import Tensor, nn

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel, SubnetModel
from avalanche_amnesia.training import (
    HAT,
    WSN,
    AdaHAT,
    AmnesiacHAT,
    InMemoryLoaderPlugin,
    TrajectoryPlugin,
    UnlearningPlugin,
)
from avalanche_amnesia.training.plugins import find_plugin

N_CLASSES = 10


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05)
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def mlp() -> nn.Module:
    return MLP(784, hidden=(256,), features=256)


def three_layers() -> nn.Module:
    return MLP(784, hidden=(256, 100), features=64)


def small_image_resnet18() -> nn.Module:
    """torchvision's ResNet-18 with the usual stem for 32×32 images, without its classifier."""
    net = torchvision.models.resnet18()
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    return net


class Network(NamedTuple):
    """A backbone to be timed."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    features: int
    batch: int
    steps: int


NETWORKS = {
    "mlp": Network(mlp, (784,), 256, batch=64, steps=100),
    "mlp3": Network(three_layers, (784,), 64, batch=128, steps=100),
    "resnet18": Network(small_image_resnet18, (3, 32, 32), 512, batch=16, steps=6),
}


def plain_steps(network: Network, optimizer_name: str, x: Tensor, y: Tensor, batch: int) -> Iterator[float]:
    """Trains a plain network; yields the seconds of each step."""
    model = nn.Sequential(network.make(), nn.Linear(network.features, N_CLASSES))
    optimizer = make_optimizer(optimizer_name, model.parameters())
    criterion = nn.CrossEntropyLoss()
    while True:
        for index in torch.randperm(len(x)).split(batch):
            inputs, labels = x[index], y[index]
            began = time.process_time()
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()
            yield time.process_time() - began


class Interleaved(SupervisedPlugin):
    """Takes a plain step in front of every step of the strategy, and the seconds of both."""

    def __init__(self, plain: Iterator[float]) -> None:
        super().__init__()
        self.plain = plain
        self.seconds: list[tuple[float, float]] = []

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.of_plain = next(self.plain)
        self.began = time.process_time()

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.seconds.append((time.process_time() - self.began, self.of_plain))

    def ratio(self) -> float:
        of_strategy, of_plain = zip(*self.seconds, strict=True)
        return median(of_strategy) / median(of_plain)


class EpochClock(SupervisedPlugin):
    """Seconds of the last epoch, set-up of the task excluded."""

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.began = time.process_time()

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.seconds = time.process_time() - self.began


def train_second_task(
    make: Callable[..., Any], network: Network, optimizer: str, benchmark: Any, batch: int, plugin: Any
) -> None:
    strategy = make(network, optimizer, train_mb_size=batch, train_epochs=1, plugins=[plugin])
    model = strategy.model
    if isinstance(model, MaskedModel):  # half of the units in use, without spending the time to learn which
        model.add_head(0, N_CLASSES)
        model.start_task(0, torch.rand(model.n_units, generator=torch.Generator().manual_seed(0)) - 0.5)
        model.finish_task()
        unlearning = find_plugin(strategy, UnlearningPlugin)
        if unlearning is not None:  # task 0 may be unlearned: it gets a shadow where the compensation keeps one
            find_plugin(strategy, TrajectoryPlugin).trajectory.record(0, {}, {})
            unlearning.ledger.learn(0)
    elif isinstance(model, SubnetModel):
        model.add_head(0, N_CLASSES)
        model.start_task(0, torch.rand(model.n_weights, generator=torch.Generator().manual_seed(0)) / 28)
        model.finish_task()
    strategy.train(benchmark.train_stream[1])


def masked(strategy_class: type, **options: Any) -> Callable[..., Any]:
    def make(network: Network, optimizer_name: str, **common: Any) -> Any:
        model = MaskedModel(network.make(), input_shape=network.input_shape)
        optimizer = make_optimizer(optimizer_name, model.parameters())
        return strategy_class(model=model, optimizer=optimizer, **options, **common)

    return make


def wsn(network: Network, optimizer_name: str, **common: Any) -> Any:
    model = SubnetModel(network.make(), sparsity=0.5, n_features=network.features)
    return WSN(model=model, optimizer=make_optimizer(optimizer_name, model.parameters()), **common)


def naive(network: Network, optimizer_name: str, *, plugins: list[Any], **common: Any) -> Any:
    model = MultiHeadModel(network.make(), network.features)
    return Naive(
        model=model,
        optimizer=make_optimizer(optimizer_name, model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[InMemoryLoaderPlugin(), *plugins],
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
        **common,
    )


CONTESTANTS = {
    "Naive": naive,
    "HAT": masked(HAT),
    "HAT, gradient space": masked(HAT, adjust="gradient"),
    "AdaHAT": masked(AdaHAT),
    "AmnesiacHAT": masked(AmnesiacHAT),
    "AmnesiacHAT, one shadow": masked(AmnesiacHAT, compensation="backup"),
    "WSN": wsn,
}


def spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=list(NETWORKS), default="mlp")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, help="64 for the MLP, 128 for mlp3, 16 for the ResNet")
    parser.add_argument("--steps", type=int, help="per round; 100 for the MLP, 6 for the ResNet")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    network = NETWORKS[options.network]
    batch, steps = options.batch or network.batch, options.steps or network.steps
    n = batch * steps
    x = torch.randn(n, *network.input_shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n) % N_CLASSES
    benchmark = task_benchmark((x, y), (x[:64], y[:64]), [list(range(N_CLASSES))] * 2)
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in options.only}
    for _ in range(options.rounds):
        for name in options.only:
            make = CONTESTANTS[name]
            interleaved = Interleaved(plain_steps(network, options.optimizer, x, y, batch))
            train_second_task(make, network, options.optimizer, benchmark, batch, interleaved)
            clock = EpochClock()
            train_second_task(make, network, options.optimizer, benchmark, batch, clock)
            plain = plain_steps(network, options.optimizer, x, y, batch)
            began = time.process_time()
            for _ in range(steps):
                next(plain)
            ratios[name].append((interleaved.ratio(), clock.seconds / (time.process_time() - began)))
    print(f"{options.network}, batch {batch}, {options.optimizer}, 1 thread, {options.rounds} rounds of {steps} steps")
    print("ratio to plain PyTorch: median over rounds (and quartiles)")
    print(f"{'strategy':24}{'step':24}loop")
    for name, values in ratios.items():
        print(f"{name:24}" + "".join(f"{spread(column):24}" for column in zip(*values, strict=True)))


if __name__ == "__main__":
    main()
