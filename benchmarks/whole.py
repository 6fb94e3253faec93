"""Measure whole runs on a stream of tasks, with data loading, relative to a plain PyTorch loop with as many steps.

An MLP 784-256-256 learns permuted MNIST, 10,000 images per task, for two epochs of 200 mini-batches of 50; without a
data root, as many permuted digits of the same size. Other networks learn permuted digits in their own input size,
for two epochs of 50 mini-batches of 16. Methods that can't train a network are left out.
The plain loop trains a new network on each task. Steps of both alternate, ten at a time, so that other load on the
machine affects both. Times are CPU times of one thread. No plugin is added to a strategy: the clock replaces methods of
its class. `run` and the thirds of a task's steps (`early` to `late`) are ratios, the other columns count plain steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.streams import PermutedMNIST
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskEndPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.unit_graph.findings import ModelError
from benchmarks.contestants import CONTESTANTS, Contestant, disjoint
from benchmarks.measuring import Figure
from benchmarks.networks import N_CLASSES, NETWORKS, Network, classifier_of, digit_tasks, make_optimizer

METHODS = ("Naive", "HAT", "AdaHAT", "AmnesiacHAT", "AmnesiacHAT, no compensation", "WSN", "DisjointSubnets")
EPOCHS = 2
MLP = NETWORKS["mlp"]._replace(input_shape=(1, 28, 28), batch=50, steps=200)
BLOCK = 10
"""Number of steps of one kind in a row."""
THIRDS = ("early", "middle", "late")
"""Parts of a task's training, with equal numbers of steps."""
PARTS = {
    "heads": ((TaskEndPlugin, "settle_head"), (CounterfactualPlugin, "prepare")),
    "trajectory": ((TrajectoryPlugin, "before_training_exp"), (TrajectoryPlugin, "after_training_exp")),
}
"""Parts of a task's start and end → the methods whose times are added."""
OF_LAST = ("end", *PARTS)
"""Measures shown only for the last task, because they grow with the number of tasks."""


def sized(name: str) -> Network:
    """Return a network with the mini-batch size and the number of steps per epoch of whole runs."""
    return MLP if name == "mlp" else NETWORKS[name]._replace(batch=16, steps=50)


def stream(network: Network, root: Path | None, tasks: int) -> Any:
    """Return the benchmark of a network: permuted MNIST for the MLP if there is a data root, else permuted digits."""
    n = network.batch * network.steps
    if root is not None and network == MLP:
        return PermutedMNIST(tasks, n_train=n, n_test=100, root=root)
    x, y = digit_tasks(network.input_shape, n, tasks)
    classes = [list(range(N_CLASSES * task, N_CLASSES * (task + 1))) for task in range(tasks)]
    some = slice(None, None, max(1, n // 200))
    return task_benchmark((x, y), (x[some], y[some]), classes)


def plain_blocks(network: Network, optimizer_name: str, x: Tensor, y: Tensor) -> Iterator[float]:
    """Train a plain network on a task, and yield the CPU seconds of each block of steps, with data loading."""
    model = classifier_of(network)
    optimizer = make_optimizer(optimizer_name, model.parameters())
    criterion = nn.CrossEntropyLoss()
    began, taken = time.process_time(), 0
    while True:
        for index in torch.randperm(len(x)).split(network.batch):
            optimizer.zero_grad()
            criterion(model(x.index_select(0, index)), y.index_select(0, index)).backward()
            optimizer.step()
            taken += 1
            if taken % BLOCK == 0:
                yield time.process_time() - began
                began = time.process_time()


class Clockwork:
    """Clock for the training of one task, which runs a block of plain steps before each block of the strategy's steps.

    Attributes:
        blocks: pairs (time of a block of the strategy's steps, time of the plain block before it).
        parts: name in :data:`PARTS` → time.
        start, end: time before the first block, and time after the last block.
    """

    def __init__(self, plain: Iterator[float]) -> None:
        self._plain, self._steps = plain, 0
        self._since = 0.0
        self.blocks: list[tuple[float, float]] = []
        self.parts: Counter[str] = Counter()
        self._of_plain = 0.0

    def time(self, strategy: Any, experience: Any) -> None:
        """Train a task, and measure its times."""
        kind = type(strategy)
        with ExitStack() as stack:
            for name, methods in PARTS.items():
                for owner, method in methods:
                    stack.enter_context(mock.patch.object(owner, method, self._timed(name, getattr(owner, method))))
            for event in ("_before_training_iteration", "_after_training_iteration"):
                watched = getattr(self, event)(getattr(kind, event))
                stack.enter_context(mock.patch.object(kind, event, watched))
            self._since = time.process_time()
            strategy.train(experience)
        self.end = time.process_time() - self._since

    def _timed(self, name: str, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.parts[name] += time.process_time() - began

        return timed

    def _before_training_iteration(self, event: Any) -> Any:
        def watched(strategy: Any, **kwargs: Any) -> None:
            if self._steps % BLOCK == 0:
                if self._steps == 0:
                    self.start = time.process_time() - self._since
                self._of_plain = next(self._plain)
                self._since = time.process_time()
            event(strategy, **kwargs)

        return watched

    def _after_training_iteration(self, event: Any) -> Any:
        def watched(strategy: Any, **kwargs: Any) -> None:
            event(strategy, **kwargs)
            self._steps += 1
            if self._steps % BLOCK == 0:
                now = time.process_time()
                self.blocks.append((now - self._since, self._of_plain))
                self._since = now

        return watched


def whole_run(contestant: Contestant, network: Network, optimizer: str, benchmark: Any) -> dict[str, list[float]]:
    """Train all tasks once; return the costs: ``run`` for the whole run, and all other measures per task.

    ``run`` and the thirds of a task's steps are ratios to the plain loop; ``start``, ``end`` and their parts are
    times in plain steps.
    """
    sizes = {"train_mb_size": network.batch, "eval_mb_size": network.batch, "train_epochs": EPOCHS}
    strategy = contestant(network, optimizer, **sizes)
    found: dict[str, list[float]] = {name: [] for name in (*THIRDS, "start", "end", *PARTS)}
    own, of_plain = 0.0, 0.0
    for experience in benchmark.train_stream:
        x, y = task_data(experience)
        clockwork = Clockwork(plain_blocks(network, optimizer, x, y % N_CLASSES))
        clockwork.time(strategy, experience)
        plain = sum(time for _, time in clockwork.blocks)
        step = plain / (BLOCK * len(clockwork.blocks))
        own += clockwork.start + clockwork.end + sum(time for time, _ in clockwork.blocks)
        of_plain += plain
        third = len(clockwork.blocks) / len(THIRDS)
        for number, name in enumerate(THIRDS):
            part = clockwork.blocks[round(number * third) : round((number + 1) * third)]
            found[name].append(sum(time for time, _ in part) / sum(time for _, time in part))
        parts = {"start": clockwork.start, "end": clockwork.end, **{name: clockwork.parts[name] for name in PARTS}}
        for name, seconds in parts.items():
            found[name].append(seconds / step)
    return {"run": [own / of_plain], **found}


def measure_whole_runs(
    name: str, methods: Sequence[str], tasks: int, optimizer: str, rounds: int, root: Path | None
) -> list[dict[str, Any]]:
    """Run each method ``rounds`` times on the stream; return a row per method with median and quartiles."""
    network = sized(name)
    runs: dict[str, list[dict[str, list[float]]]] = {method: [] for method in methods}
    benchmark = stream(network, root, tasks)
    for _ in range(rounds):
        for method in methods:
            contestant = disjoint(tasks) if method == "DisjointSubnets" else CONTESTANTS[method]
            try:
                runs[method].append(whole_run(contestant, network, optimizer, benchmark))
            except ModelError as error:
                print(f"{name}, {method}: left out, {error}", flush=True)
                continue
            print(
                f"{name}, {tasks} tasks, {method}:",
                {part: round(values[-1], 2) for part, values in runs[method][-1].items()},
                flush=True,
            )
    return [
        {"method": method, **{name: figure([found[name] for found in of], name) for name in of[0]}}
        for method, of in runs.items()
        if of
    ]


def figure(rounds: Sequence[Sequence[float]], name: str) -> Figure:
    """Return median and quartiles of a measure, over all tasks and rounds, or over the last task if in ``OF_LAST``."""
    return Figure.of([value for values in rounds for value in (values[-1:] if name in OF_LAST else values)])


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the results of whole runs as a Markdown table."""
    names = [name for name in rows[0] if name != "method"]
    heads = [f"{name} of the last task" if name in OF_LAST else name for name in names]
    lines = [f"| {title} | {' | '.join(heads)} |", "|---" * (1 + len(names)) + "|"]
    for row in rows:
        cells = [shown(row[name], whole=name not in ("run", *THIRDS)) for name in names]
        lines.append(f"| {row['method']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def shown(of: Figure, *, whole: bool) -> str:
    """Return median and quartiles as text, rounded to integers if ``whole``."""
    return f"{of.median:.0f} ({of.low:.0f} to {of.high:.0f})" if whole else str(of)
