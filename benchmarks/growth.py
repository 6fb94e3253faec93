"""Measure how costs grow with the number of tasks, and how the cost of unlearning grows with the network's size.

    python -m benchmarks.growth [--method amnesiac heads pools wsn small] [--optimizer sgd adam] [--tasks T]
                                [--network mlp resnet18] [--out DIR]

Permuted digits, few samples per task, on an MLP 784-256-256 (``heads``: with counterfactual heads; ``small``: MLP
16-8-8, with ten times as many tasks). Each row is a task; most tasks have none. Times are CPU times of one thread, as
multiples of a plain PyTorch step, which runs before every step of the task. Repeated measures are medians.

    plain     milliseconds of a plain step with a mini-batch of 64 samples
    start     from the call of `strategy.train` to the first mini-batch
    step      training step, relative to the plain step before it
    end       from the last step to the return of `strategy.train`
    eval      `strategy.eval` of the first task
    model     KiB that the task added to the model's `state_dict`
    log       KiB that the task added to the trajectory
    save      `save_state` into a folder that holds the state before the task
    disk      KiB that the task added to the saved state
    load      `load_state` of that state into another strategy
    plan      `strategy.plan_unlearning` of this task (last), and of the first task
    unlearn   `strategy.unlearn` of this task; a plugin fails at its end, which restores the task for the next round

A second table has CPU milliseconds for several networks after three tasks of two mini-batches of random inputs: the
first unlearning of a strategy; later ones; the two passes over the model in each unlearning that look for changed
tensors; a plain step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.bits import model_hashes
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.models import MLP, DisjointModel, MaskedModel, SubnetModel
from avalanche_amnesia.training import WSN, AmnesiacHAT, DisjointSubnets, ScoredWeights, load_state, save_state
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from benchmarks.measuring import plain_steps
from benchmarks.networks import N_CLASSES, NETWORKS, Network, digit_tasks, make_optimizer
from benchmarks.place import Span
from benchmarks.unlearning_cost import TakesBack, milliseconds, trained, unlearning

BATCH = 64
METHODS = {
    "amnesiac": "AmnesiacHAT, MLP 784-256-256, without compensation, in plain steps.",
    "heads": "AmnesiacHAT, MLP 784-256-256, with counterfactual heads, in plain steps.",
    "pools": "DisjointSubnets, MLP 784-256-256, one slot per task, in plain steps.",
    "wsn": "WSN of density .1, scores in 1 bit, MLP 784-256-256, in plain steps.",
    "small": "AmnesiacHAT, MLP 16-8-8, without compensation, in plain steps.",
}
OPTIMIZERS = ("sgd", "adam")


class Watch(SupervisedPlugin):
    """Plugin that measures the time of each training step, and of a plain step before it.

    Args:
        plain: iterator that runs a plain step, and yields its time.
    """

    def __init__(self, plain: Iterator[Span]) -> None:
        super().__init__()
        self.plain = plain
        self.steps: list[tuple[float, float]] = []

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        if not self.steps:
            self.first = time.process_time()
        self.of_plain = next(self.plain).seconds
        self.began = time.process_time()

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.last = time.process_time()
        self.steps.append((self.last - self.began, self.of_plain))


def stream(tasks: int, steps: int, pixels: int) -> Any:
    """Return a benchmark of permuted digits; samples are repeated so that each task has ``steps`` mini-batches."""
    x, y = digit_tasks((pixels,), BATCH)
    x, y = x[:BATCH].repeat(steps, 1), y[:BATCH].repeat(steps)
    orders = [torch.randperm(pixels, generator=torch.Generator().manual_seed(task)) for task in range(tasks)]
    train = torch.cat([x[:, order] for order in orders]), torch.cat([y + N_CLASSES * t for t in range(tasks)])
    test = (
        torch.cat([x[:BATCH, order] for order in orders]),
        torch.cat([y[:BATCH] + N_CLASSES * t for t in range(tasks)]),
    )
    classes = [[*range(N_CLASSES * t, N_CLASSES * (t + 1))] for t in range(tasks)]
    return task_benchmark(train, test, classes)


def made(method: str, optimizer: str, tasks: int, network: Network, plugins: list[Any]) -> Any:
    torch.manual_seed(0)
    net = network.make()
    evaluator = EvaluationPlugin(accuracy_metrics(experience=True), loggers=[BaseLogger()])
    options: dict[str, Any] = {"train_mb_size": BATCH, "eval_mb_size": 256, "evaluator": evaluator, "plugins": plugins}
    kind: Any = AmnesiacHAT
    if method == "wsn":
        kind, model, options["masks"] = WSN, SubnetModel(net, density=0.1), ScoredWeights(score_bits=1)
    elif method == "pools":
        kind, model, options["isolation"] = DisjointSubnets, DisjointModel(net), Pools(tasks)
    else:
        model, counterfactual = MaskedModel(net, input_shape=network.input_shape), method == "heads"
        options["compensation"] = "counterfactual" if counterfactual else "none"
    return kind(model=model, optimizer=make_optimizer(optimizer, model.parameters()), **options)


def nbytes(strategy: Any) -> tuple[int, int]:
    recorder = find_plugin(strategy, TrajectoryPlugin)
    store = None if recorder is None else recorder.trajectory
    held = sum(value.nbytes for value in strategy.model.state_dict().values())
    return held, 0 if store is None else sum(store.nbytes(task) for task in store.tasks)


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def row(
    strategy: Any, other: Any, experiences: Any, watch: Watch, takes_back: TakesBack, rounds: int, folder: Path
) -> dict[str, float]:
    """Train the next task; return the costs of its training, its evaluation and requests after it, by name.

    The state of ``strategy`` is loaded into ``other``, a strategy of the same arguments.
    """
    strategy.plugins.remove(watch)  # its plain network belongs to no saved state
    for _ in range(2):  # the second finds the files of earlier tasks checked, as in a run that saves after every task
        save_state(strategy, folder)
    strategy.plugins.append(watch)
    held, kept = nbytes(strategy), on_disk(folder)
    watch.steps.clear()
    task = experiences[0].task_label
    began = time.process_time()
    strategy.train(experiences[0])
    ended = time.process_time()
    pace = 1e3 * median([*(plain for _, plain in watch.steps), *(next(watch.plain).seconds for _ in range(rounds))])
    now = nbytes(strategy)
    found = {
        "plain": pace,
        "start": 1e3 * (watch.first - began) / pace,
        "step": median(step / plain for step, plain in watch.steps),
        "end": 1e3 * (ended - watch.last) / pace,
        "eval": milliseconds(lambda: strategy.eval(experiences[1:]), rounds) / pace,
        "model": (now[0] - held[0]) / 1024,
        "log": (now[1] - held[1]) / 1024,
    }
    strategy.plugins.remove(watch)  # an unlearning can't remove a task from the plain network in this plugin
    found["save"] = milliseconds(lambda: save_state(strategy, folder), 1) / pace  # a second save would write nothing
    found["disk"] = (on_disk(folder) - kept) / 1024
    found["load"] = milliseconds(lambda: load_state(other, folder), rounds) / pace
    asked: Callable[[Sequence[int]], Any] = strategy.plan_unlearning
    found["plan last"] = milliseconds(lambda: asked([task]), rounds) / pace
    found["plan first"] = milliseconds(lambda: asked([0]), rounds) / pace
    found["unlearn"] = unlearning(strategy, takes_back, task, rounds)[0] / pace
    strategy.plugins.append(watch)
    return found


def grown(method: str, optimizer: str, tasks: int, steps: int, rounds: int) -> list[dict[str, float]]:
    """Train ``tasks`` tasks with a method; return a row of costs for some of them, e.g. the 10th and the 100th."""
    pixels, width = (16, 8) if method == "small" else (784, 256)
    network = Network(lambda: MLP(pixels, hidden=(width,), features=width), (pixels,), width, BATCH, steps, 1)
    x, y = digit_tasks((pixels,), BATCH)
    watch = Watch(plain_steps(network, optimizer, x[:BATCH], y[:BATCH], BATCH))
    takes_back = TakesBack()
    strategy = made(method, optimizer, tasks, network, [watch, takes_back])
    other, benchmark = made(method, optimizer, tasks, network, [TakesBack()]), stream(tasks, steps, pixels)
    shown = {tasks - 1, *(t for t in (1, 4, 9, 24, 49, 99, 199, 499, 999) if t < tasks)}
    rows = []
    with TemporaryDirectory() as folder:
        for task, experience in enumerate(benchmark.train_stream):
            if task in shown:
                both = [experience, benchmark.test_stream[0]]
                rows.append({"tasks": task + 1, **row(strategy, other, both, watch, takes_back, rounds, Path(folder))})
                print(method, optimizer, rows[-1], flush=True)
            else:
                strategy.train(experience)
    return rows


def one_network(name: str, tasks: int, rounds: int) -> dict[str, float]:
    """Measure the costs of unlearning the first of several tasks on the network ``name``; return them by name."""
    network = NETWORKS[name]
    strategy, takes_back, _ = trained(network, network.batch, 2, tasks)
    x = torch.randn(network.batch, *network.input_shape)
    plain = plain_steps(network, "sgd", x, torch.arange(network.batch) % N_CLASSES, network.batch)
    found = {
        "parameters": float(sum(parameter.numel() for parameter in strategy.model.backbone.parameters())),
        "first": unlearning(strategy, takes_back, 0, 1)[0],
        "later": unlearning(strategy, takes_back, 0, rounds)[0],
        "hashes": 2 * milliseconds(lambda: model_hashes(strategy.model), rounds),
        "step": milliseconds(lambda: next(plain), rounds),
    }
    print(name, found, flush=True)
    return found


def table(about: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table, with the text ``about`` above it."""
    names = list(rows[0])
    cells = [[f"{row[n]:,.2f}" if isinstance(row[n], float) else str(row[n]) for n in names] for row in rows]
    lines = [" | ".join(row) for row in (names, ["---"] * len(names), *cells)]
    return "\n".join([about, "", *(f"| {line} |" for line in lines), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--optimizer", nargs="*", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--network", nargs="*", choices=list(NETWORKS), default=["mlp", "resnet18", "vit_base"])
    parser.add_argument("--tasks", type=int, default=100, help="``small`` has ten times as many")
    parser.add_argument("--steps", type=int, default=8, help="mini-batches per task")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="directory of growth.*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"torch": torch.__version__, "load": os.getloadavg()[0]}  # networks first: a fresh process
    found["networks"] = [{"network": name, **one_network(name, 3, options.rounds)} for name in options.network]
    for method, optimizer in product(options.method, options.optimizer):
        tasks = options.tasks * (10 if method == "small" else 1)
        found[f"{method}, {optimizer}"] = grown(method, optimizer, tasks, options.steps, options.rounds)
        (options.out / "growth.json").write_text(json.dumps(found, indent=1) + "\n")
        named = [(f"{METHODS[m]} {o.upper()}.", found.get(f"{m}, {o}")) for m in METHODS for o in OPTIMIZERS]
        tables = [table(about, rows) for about, rows in named if rows]
        tables += [table("Unlearning, CPU ms of one thread.", found["networks"])] if found["networks"] else []
        place = f"torch {found['torch']}; load average {found['load']:.1f} at the start.\n"
        (options.out / "growth.md").write_text("\n".join(["# Growth of costs with tasks", "", __doc__, place, *tables]))


if __name__ == "__main__":
    main()
