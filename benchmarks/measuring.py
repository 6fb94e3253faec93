"""Cost of a training step of each strategy, as a ratio to a plain PyTorch step of the same network.

    python -m benchmarks.step_cost [--network mlp|wide|mlp3|resnet18] [--rounds N] [--batch B] [--optimizer sgd|adam]

Every contestant trains MLP 784-256-256, MLP 784-2000-2000 (``wide``), MLP 784-256-100-64 (``mlp3``), or torchvision's
ResNet-18 on 32×32 images, in one thread through `strategy.train`. The images are the embedded real digits, enlarged,
drawn with some noise, one label in twenty wrong so that the loss stays above 0, the second task's pixels permuted. The
first task is learned, and the second one for an epoch, before anything is measured: gates are then sharp, as they are
for most of a training, and protection is on. Measured are whole epochs of the second task, as the gates' scale grows
within an epoch. What one shadow costs is the difference of the two rows of AmnesiacHAT.

Two ratios of CPU time, medians (and quartiles):

    step   from zeroing gradients to the updated parameters; a plain step runs before each of them, in the same process,
           and every step is compared with the one before it
    loop   a whole epoch through Avalanche's loop, data loading and all of its events included, against an epoch of a
           plain loop that indexes tensors

and in one more epoch, not timed, of some of its steps the subnormal numbers that any operation returns or writes, and
that are left in parameters, gradients and moments, per step. ``--flush`` lets the processor take them for 0: a control.
"""

from __future__ import annotations

import argparse
import math
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

from avalanche_amnesia.benchmarks import SplitDigits, task_benchmark
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel, SubnetModel
from avalanche_amnesia.training import HAT, WSN, AdaHAT, AmnesiacHAT
from avalanche_amnesia.training.plugins import InMemoryLoaderPlugin
from benchmarks.subnormals import SubnormalWatch

N_CLASSES = 10
WATCHED = 20
"""Steps of the last epoch that are looked at."""


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05)
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def mlp() -> nn.Module:
    return MLP(784, hidden=(256,), features=256)


def wide() -> nn.Module:
    return MLP(784, hidden=(2000,), features=2000)


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
    """A backbone to be timed: mini-batches per epoch, epochs that the first task is learned for."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    features: int
    batch: int
    steps: int
    epochs: int


NETWORKS = {
    "mlp": Network(mlp, (784,), 256, batch=64, steps=400, epochs=5),
    "wide": Network(wide, (784,), 2000, batch=64, steps=100, epochs=3),
    "mlp3": Network(three_layers, (784,), 64, batch=128, steps=400, epochs=5),
    "resnet18": Network(small_image_resnet18, (3, 32, 32), 512, batch=16, steps=12, epochs=2),
}


def two_tasks(shape: tuple[int, ...], n: int) -> tuple[Tensor, Tensor]:
    """``n`` images of digits with a shape and their labels, then the same with permuted pixels, labels from 10 on."""
    small, labels = task_data(SplitDigits(1).train_stream[0])
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(small), (n,), generator=generator)
    side = math.isqrt(shape[-1] ** len(shape[:2])) if len(shape) > 1 else math.isqrt(shape[0])
    large = nn.functional.interpolate(small[chosen], (side, side), mode="bilinear")
    x = (large + 0.1 * torch.randn(large.shape, generator=generator)).expand(n, math.prod(shape) // side**2, side, side)
    x = x.reshape(n, -1)
    order = torch.randperm(x.shape[1], generator=generator)
    both = torch.cat([x, x[:, order]]).view(2 * n, *shape)
    y = torch.where(torch.rand(n, generator=generator) < 0.05, torch.arange(n) % N_CLASSES, labels[chosen])
    return both, torch.cat([y, y + N_CLASSES])


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


class Meter(SupervisedPlugin):
    """Measures a task after its first epoch: steps in one epoch, the loop in the next one, and so on.

    Args:
        plain: the seconds of plain steps.
        steps: steps per epoch.
        rounds: how many epochs of each kind.
    """

    def __init__(self, plain: Iterator[float], steps: int, rounds: int) -> None:
        super().__init__()
        self.plain, self.n_steps, self.rounds = plain, steps, rounds
        self.steps: list[float] = []
        self.loops: list[float] = []

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        epoch = strategy.clock.train_exp_epochs
        measured = 0 < epoch <= 2 * self.rounds
        self.by_step, self.whole = measured and epoch % 2 == 1, measured and epoch % 2 == 0
        self.epoch_began = time.process_time()

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        if self.by_step:
            self.of_plain = next(self.plain)
            self.began = time.process_time()

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        if self.by_step:
            self.steps.append((time.process_time() - self.began) / self.of_plain)

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        if self.whole:
            now = time.process_time()
            for _ in range(self.n_steps):
                next(self.plain)
            self.loops.append((now - self.epoch_began) / (time.process_time() - now))


def masked(strategy_class: type, **options: Any) -> Callable[..., Any]:
    def make(network: Network, optimizer_name: str, **common: Any) -> Any:
        model = MaskedModel(network.make(), input_shape=network.input_shape)
        optimizer = make_optimizer(optimizer_name, model.parameters())
        return strategy_class(model=model, optimizer=optimizer, **options, **common)

    return make


def wsn(network: Network, optimizer_name: str, **common: Any) -> Any:
    model = SubnetModel(network.make(), density=0.5, n_features=network.features)
    return WSN(model=model, optimizer=make_optimizer(optimizer_name, model.parameters()), **common)


def naive(network: Network, optimizer_name: str, **common: Any) -> Any:
    model = MultiHeadModel(network.make(), network.features)
    return Naive(
        model=model,
        optimizer=make_optimizer(optimizer_name, model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[InMemoryLoaderPlugin()],
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
        **common,
    )


CONTESTANTS = {
    "Naive": naive,
    "HAT": masked(HAT),
    "HAT, gradient space": masked(HAT, space="gradient"),
    "AdaHAT": masked(AdaHAT),
    "AmnesiacHAT": masked(AmnesiacHAT),
    "AmnesiacHAT, one shadow": masked(AmnesiacHAT, compensation="backup"),
    "WSN": wsn,
}


def spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


def measure(name: str, network: Network, optimizer: str, batch: int, steps: int, rounds: int) -> list[str]:
    """The cells of a contestant's row."""
    x, y = two_tasks(network.input_shape, batch * steps)
    classes = [list(range(N_CLASSES)), list(range(N_CLASSES, 2 * N_CLASSES))]
    benchmark = task_benchmark((x, y), (x, y), classes)
    second = y >= N_CLASSES
    plain = plain_steps(network, optimizer, x[second], y[second] - N_CLASSES, batch)
    meter, last = Meter(plain, steps, rounds), 1 + 2 * rounds
    watch = SubnormalWatch(max(1, steps // WATCHED), lambda strategy: strategy.clock.train_exp_epochs == last)
    strategy = CONTESTANTS[name](network, optimizer, train_mb_size=batch, train_epochs=network.epochs)
    strategy.train(benchmark.train_stream[0])
    strategy.train_epochs = last + 1
    strategy.plugins += [meter, watch]
    strategy.train(benchmark.train_stream[1])
    return [spread(meter.steps), spread(meter.loops), f"{watch.found.total() / watch.steps:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=list(NETWORKS), default="mlp")
    parser.add_argument("--rounds", type=int, default=3, help="epochs measured for steps, and as many for the loop")
    parser.add_argument("--batch", type=int, help="64 for the MLP, 128 for mlp3, 16 for the ResNet")
    parser.add_argument("--steps", type=int, help="per epoch; 400 for the MLP, 100 for the wide one, 12 for the ResNet")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--flush", action="store_true", help="let the processor take subnormal numbers for 0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(options.flush)
    warnings.simplefilter("ignore")
    network = NETWORKS[options.network]
    batch, steps = options.batch or network.batch, options.steps or network.steps
    print(f"{options.network}, batch {batch}, {options.optimizer}, 1 thread, {options.rounds} epochs of {steps} steps")
    print("ratio to plain PyTorch: median over steps, or epochs (and quartiles); subnormal numbers per step")
    print(f"{'strategy':24}{'step':24}{'loop':24}subnormals")
    for name in options.only:
        cells = measure(name, network, options.optimizer, batch, steps, options.rounds)
        print(f"{name:24}" + "".join(f"{cell:24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
