"""What a training step of each strategy costs, as a ratio to a plain PyTorch step of the same network.

    python -m benchmarks.step_cost [--rounds N] [--batch B] [--optimizer sgd|adam]

Every contestant trains MLP 784-256-256 on the same random mini-batches in one thread, in this process; rounds are
interleaved and a contestant's figure is the median over rounds of its time divided by the plain loop's time in the
same round. Contestants run through Avalanche's whole loop (`strategy.train`), data loading included; the plain loop
indexes tensors. Measured is the second task, where half of the units are in use and protection is on.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from torch import nn

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel
from avalanche_amnesia.training import HAT, AdaHAT, AmnesiacHAT, InMemoryLoaderPlugin

N_CLASSES = 10


class Stopwatch(SupervisedPlugin):
    """Seconds between the first and the last step of a training call, set-up of the task excluded."""

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.started


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05)
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def plain_epoch(optimizer_name: str, x: torch.Tensor, y: torch.Tensor, batch: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(MLP(784, hidden=(256,), features=256), nn.Linear(256, N_CLASSES))
    optimizer = make_optimizer(optimizer_name, model.parameters())
    criterion = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for index in torch.randperm(len(x)).split(batch):
        optimizer.zero_grad()
        criterion(model(x[index]), y[index]).backward()
        optimizer.step()
    return time.perf_counter() - started


def contestant(make: Callable[..., Any], optimizer_name: str, benchmark: Any, batch: int) -> Callable[[], float]:
    """A function that trains one epoch of the second task and returns its seconds."""

    def measure() -> float:
        torch.manual_seed(0)
        watch = Stopwatch()
        strategy = make(optimizer_name, train_mb_size=batch, train_epochs=1, plugins=[watch])
        _train_first_task(strategy, benchmark.train_stream[0])
        strategy.train(benchmark.train_stream[1])
        return watch.seconds

    return measure


def _train_first_task(strategy: Any, experience: Any) -> None:
    """Half of the units in use, without spending the time to learn which."""
    model = strategy.model
    if isinstance(model, MaskedModel):
        model.add_head(0, N_CLASSES)
        generator = torch.Generator().manual_seed(0)
        model.start_task(0, torch.rand(model.n_units, generator=generator) - 0.5)
        model.finish_task()


def masked(strategy_class: type, **options: Any) -> Callable[..., Any]:
    def make(optimizer_name: str, **common: Any) -> Any:
        model = MaskedModel(MLP(784, hidden=(256,), features=256))
        optimizer = make_optimizer(optimizer_name, model.parameters())
        return strategy_class(model=model, optimizer=optimizer, **options, **common)

    return make


def naive(optimizer_name: str, *, plugins: list[Any], **common: Any) -> Any:
    model = MultiHeadModel(MLP(784, hidden=(256,), features=256))
    return Naive(
        model=model,
        optimizer=make_optimizer(optimizer_name, model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[InMemoryLoaderPlugin(), *plugins],
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
        **common,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    n = arguments.batch * arguments.steps
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 784, generator=generator), torch.arange(n) % N_CLASSES
    benchmark = task_benchmark((x, y), (x[:64], y[:64]), [list(range(N_CLASSES))] * 2)
    contestants: dict[str, Callable[[], float]] = {
        name: contestant(make, arguments.optimizer, benchmark, arguments.batch)
        for name, make in {
            "Naive": naive,
            "HAT": masked(HAT),
            "HAT, gradient space": masked(HAT, adjust="gradient"),
            "AdaHAT": masked(AdaHAT),
            "AmnesiacHAT": masked(AmnesiacHAT),
        }.items()
    }
    ratios: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, measure in contestants.items():
            plain = plain_epoch(arguments.optimizer, x, y, arguments.batch)
            ratios[name].append(measure() / plain)
    print(f"MLP 784-256-256, batch {arguments.batch}, {arguments.optimizer}, 1 thread, {arguments.rounds} rounds")
    print("strategy                ratio to a plain step (median, and quartiles)")
    for name, values in ratios.items():
        ordered = sorted(values)
        low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
        print(f"{name:24}{median(values):.2f}   ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
