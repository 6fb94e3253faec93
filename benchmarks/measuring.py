"""Measurement of a strategy's training costs, as ratios to a plain PyTorch step of the same network.

On a CPU, times are CPU times of one thread; on a GPU, times between two CUDA events. Plain steps run between the
measured steps, so that other load on the machine affects both. The second task is measured (with several shadows, a
later one), after its first epoch: gates are then nearly binary, as for most of a training, and weights of earlier tasks
are protected. Whole epochs are measured, because the gates' scale grows within an epoch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor, nn

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from benchmarks.contestants import CONTESTANTS, EARLIER
from benchmarks.networks import N_CLASSES, Network, classifier_of, digit_tasks, make_optimizer
from benchmarks.place import CPU, Place, Span
from benchmarks.subnormals import SubnormalWatch

WATCHED = 20
"""Number of steps in the last epoch for which subnormal numbers are counted."""
EVALUATED = 10
"""Number of mini-batches to evaluate."""


class Figure(NamedTuple):
    """Median and quartiles of a measure."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        ordered = sorted(values)
        return cls(median(values), ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def plain_steps(
    network: Network, optimizer_name: str, x: Tensor, y: Tensor, batch: int, place: Place = CPU
) -> Iterator[Span]:
    """Train a plain PyTorch network endlessly, and yield the time of each step."""
    model = place.put(classifier_of(network))
    optimizer = make_optimizer(optimizer_name, model.parameters())
    criterion = nn.CrossEntropyLoss()
    while True:
        for index in torch.randperm(len(x)).to(x.device).split(batch):
            inputs, labels = x[index], y[index]
            began = place.mark()
            optimizer.zero_grad()
            with place.precision():
                logits = model(inputs)
            criterion(logits, labels).backward()
            optimizer.step()
            yield Span(began, place.mark())


def timed(work: Callable[[], object], place: Place) -> float:
    """Call ``work``, and return the seconds that it took."""
    began = place.mark()
    work()
    return Span(began, place.mark()).seconds


def live_bytes() -> int:
    """Return the bytes of all existing tensors; tensors that share memory count once."""
    gc.collect()  # data and model of an earlier training are in reference cycles
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Meter(SupervisedPlugin):
    """Plugin that measures a task's training after its first epoch: single steps and whole epochs, in turn.

    Args:
        plain: iterator that runs a plain step, and yields its time.
        steps: number of steps per epoch.
        rounds: number of epochs to measure by step, and number of epochs to measure as a whole.
        place: device on which both run.

    Attributes:
        steps: pairs (time of a step, time of the plain step before it).
        loops: pairs (time of an epoch, time of an epoch of plain steps after it).
        began, ended: start of the first epoch, and end of the last epoch.
        held: bytes of all tensors after the last backward pass of the task's first epoch.
    """

    def __init__(self, plain: Iterator[Span], steps: int, rounds: int, place: Place) -> None:
        super().__init__()
        self.plain, self.n_steps, self.rounds, self.place = plain, steps, rounds, place
        self.steps: list[tuple[Span, Span]] = []
        self.loops: list[tuple[Span, Span]] = []
        self.held = 0

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        epoch = strategy.clock.train_exp_epochs
        measured = 0 < epoch <= 2 * self.rounds
        self.by_step, self.whole = measured and epoch % 2 == 1, measured and epoch % 2 == 0
        self.epoch_began = self.place.mark()
        if epoch == 0:
            self.began = self.epoch_began

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        if self.by_step:
            self.plain_step = next(self.plain)
            self.step_began = self.place.mark()

    def after_backward(self, strategy: Any, **kwargs: Any) -> None:
        if not self.held and strategy.clock.train_exp_iterations == self.n_steps - 1:  # in the epoch not measured
            self.held = live_bytes()

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        if self.by_step:
            self.steps.append((Span(self.step_began, self.place.mark()), self.plain_step))

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.ended = self.place.mark()
        if self.whole:
            for _ in range(self.n_steps):
                next(self.plain)
            behind = self.place.mark()
            self.loops.append((Span(self.epoch_began, self.ended), Span(self.ended, behind)))
            self.ended = behind


def ratios(pairs: Sequence[tuple[Span, Span]]) -> Figure:
    """Return median and quartiles of the ratio (first time ÷ second time) over ``pairs``."""
    return Figure.of([own.seconds / plain.seconds for own, plain in pairs])


def measure(
    name: str, network: Network, optimizer: str, batch: int, steps: int, rounds: int, place: Place = CPU
) -> dict[str, Figure]:
    """Measure the costs of the strategy ``name``; return measure → median and quartiles.

    * ``step``: from zeroing gradients to the updated parameters; time relative to a plain step.
    * ``loop``: time of an epoch in Avalanche's loop, with loading and all events, relative to an epoch of plain steps.
    * ``evaluation``: time to evaluate some mini-batches, relative to plain forward passes.
    * ``start`` and ``end`` of a task, ``unlearn first`` and ``unlearn later``: times in plain steps.
    * ``memory``: bytes of all tensors during a task's training, without a plain training's parameters, gradients and
      data, in copies of the network. ``trajectory``: bytes of all tasks' updates, in copies of the network.
    * ``subnormals``: subnormal numbers per step.
    """
    tasks = 1 + EARLIER.get(name, 1)
    x, y = digit_tasks(network.input_shape, batch * steps, tasks)
    x, y = place.put_images(x), y.to(place.device)
    classes = [list(range(N_CLASSES * task, N_CLASSES * (task + 1))) for task in range(tasks)]
    of_last = y // N_CLASSES == tasks - 1
    tested = torch.cat([(y // N_CLASSES == task).nonzero()[: EVALUATED * batch, 0] for task in range(tasks)])
    benchmark = task_benchmark((x, y), (x[tested], y[tested]), classes)
    plain = plain_steps(network, optimizer, x[of_last], y[of_last] % N_CLASSES, batch, place)
    next(plain)
    without = live_bytes()  # the plain network with its gradients, and the data
    meter, last = Meter(plain, steps, rounds, place), 1 + 2 * rounds
    watch = SubnormalWatch(max(1, steps // WATCHED), lambda strategy: strategy.clock.train_exp_epochs == last)
    options = {"train_mb_size": batch, "train_epochs": network.epochs, "eval_mb_size": batch, "device": place.device}
    strategy = CONTESTANTS[name](network, optimizer, **options)
    place.put(strategy.model)
    place.lower(strategy)
    strategy.train(benchmark.train_stream[:-1])
    strategy.train_epochs = last + 1
    strategy.plugins += [meter, watch]
    began = place.mark()
    strategy.train(benchmark.train_stream[-1])
    ended = place.mark()
    strategy.plugins = [plugin for plugin in strategy.plugins if plugin not in (meter, watch)]  # meter contains data
    step = median(plain.seconds for _, plain in meter.steps)
    found = {
        "step": ratios(meter.steps),
        "loop": ratios(meter.loops),
        "start": Figure.of([Span(began, meter.began).seconds / step]),
        "end": Figure.of([Span(meter.ended, ended).seconds / step]),
        "subnormals": Figure.of([watch.found.total() / watch.steps]),
    }
    forward = place.put(classifier_of(network)).eval()
    parts = x[tested][-EVALUATED * batch :].split(batch)
    with torch.no_grad(), place.precision():
        evaluations = [
            timed(lambda: strategy.eval(benchmark.test_stream[-1]), place)
            / timed(lambda: [forward(part) for part in parts], place)
            for _ in range(max(3, rounds))
        ]
    found["evaluation"] = Figure.of(evaluations)
    bytes_of_parameters = sum(p.numel() * p.element_size() for p in classifier_of(network).parameters())
    loaded = x[of_last].nbytes + y[of_last].nbytes  # the loader's copy of the task's data
    extra = meter.held - without - loaded - 2 * bytes_of_parameters  # parameters and gradients
    found["memory"] = Figure.of([extra / bytes_of_parameters])
    recorder = find_plugin(strategy, TrajectoryPlugin)
    if recorder is not None:
        found["trajectory"] = Figure.of([recorder.trajectory.nbytes() / bytes_of_parameters])
        for which, task in (("unlearn first", tasks - 1), ("unlearn later", 0)):
            found[which] = Figure.of([timed(lambda task=task: strategy.unlearn([task]), place) / step])
    return found
