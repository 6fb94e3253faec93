"""Growth of costs with the number of tasks: permuted digits, few samples per task, an MLP 784-256-256.

    python -m benchmarks.growth [--method amnesiac|wsn] [--tasks T] [--steps N] [--rounds N]

After some of the tasks a row: CPU milliseconds of one thread, medians where there are rounds,

    start     from `strategy.train` to the first mini-batch
    step      of a mini-batch of 64 samples
    end       from the last step to the return of `strategy.train`
    eval      `strategy.eval` of the first task
    plan      `strategy.plan_unlearning` of the last task, and of the first
    unlearn   `strategy.unlearn` of the last task; a failure behind it puts the task back
    model     bytes of `state_dict`, in KiB per task
    log       bytes of the trajectory, in KiB per task
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
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from torch.optim import SGD

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.models import MLP, MaskedModel, SubnetModel
from avalanche_amnesia.training import WSN, AmnesiacHAT
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import TrajectoryPlugin
from benchmarks.step_cost import two_tasks
from benchmarks.unlearning_cost import TakesBack, milliseconds, unlearning

BATCH, N_CLASSES = 64, 10
COLUMNS = ("start", "step", "end", "eval", "plan last", "plan first", "unlearn", "model", "log")


class Watch(SupervisedPlugin):
    """Notes when a training's steps begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.steps.append(time.process_time())

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.last = time.process_time()


def stream(tasks: int, steps: int) -> Any:
    """Tasks with pixels of their own order; every sample is there a few times, so that a task has ``steps`` batches."""
    x, y = two_tasks((784,), BATCH)
    x, y = x[:BATCH].repeat(steps, 1), y[:BATCH].repeat(steps)
    orders = [torch.randperm(784, generator=torch.Generator().manual_seed(task)) for task in range(tasks)]
    train = torch.cat([x[:, order] for order in orders]), torch.cat([y + N_CLASSES * t for t in range(tasks)])
    test = (
        torch.cat([x[:BATCH, order] for order in orders]),
        torch.cat([y[:BATCH] + N_CLASSES * t for t in range(tasks)]),
    )
    classes = [[*range(N_CLASSES * t, N_CLASSES * (t + 1))] for t in range(tasks)]
    return task_benchmark(train, test, classes)


def made(method: str, plugins: list[Any]) -> Any:
    torch.manual_seed(0)
    net = MLP(784, hidden=(256,), features=256)
    evaluator = EvaluationPlugin(accuracy_metrics(experience=True), loggers=[BaseLogger()])
    options: dict[str, Any] = {"train_mb_size": BATCH, "eval_mb_size": 256, "evaluator": evaluator, "plugins": plugins}
    if method == "wsn":
        model = SubnetModel(net, density=0.1)
        return WSN(model=model, optimizer=SGD(model.parameters(), lr=0.1), **options)
    masked = MaskedModel(net, input_shape=(784,))
    return AmnesiacHAT(model=masked, optimizer=SGD(masked.parameters(), lr=0.1), compensation="none", **options)


def nbytes(strategy: Any) -> tuple[int, int]:
    recorder = find_plugin(strategy, TrajectoryPlugin)
    store = None if recorder is None else recorder.trajectory
    held = sum(value.nbytes for value in strategy.model.state_dict().values())
    return held, 0 if store is None else sum(store.nbytes(task) for task in store.tasks)


def row(strategy: Any, experiences: Any, watch: Watch, takes_back: TakesBack, rounds: int) -> dict[str, float]:
    """Costs of the next training, and of what can be done afterwards."""
    held = nbytes(strategy)
    watch.steps.clear()
    task = experiences[0].task_label
    began = time.process_time()
    strategy.train(experiences[0])
    ended = time.process_time()
    steps = [1e3 * (after - before) for before, after in zip(watch.steps, watch.steps[1:], strict=False)]
    now = nbytes(strategy)
    found = {
        "start": 1e3 * (watch.steps[0] - began),
        "step": median(steps),
        "end": 1e3 * (ended - watch.last),
        "eval": milliseconds(lambda: strategy.eval(experiences[1:]), rounds),
        "model": (now[0] - held[0]) / 1024,
        "log": (now[1] - held[1]) / 1024,
    }
    if takes_back in strategy.plugins:
        asked: Callable[[int], Any] = strategy.plan_unlearning
        found["plan last"] = milliseconds(lambda: asked([task]), rounds)
        found["plan first"] = milliseconds(lambda: asked([0]), rounds)
        found["unlearn"] = unlearning(strategy, takes_back, task, rounds)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=["amnesiac", "wsn"], default="amnesiac")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--steps", type=int, default=8, help="mini-batches per task")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    watch, takes_back = Watch(), TakesBack()
    strategy = made(options.method, [watch, takes_back])
    benchmark = stream(options.tasks, options.steps)
    shown = {options.tasks - 1, *(t for t in (1, 4, 9, 24, 49, 99, 199, 499, 999) if t < options.tasks)}
    print(f"{options.method}, {options.tasks} tasks of {options.steps} steps, CPU ms of 1 thread, KiB per task")
    print(f"{'task':>6}" + "".join(f"{name:>12}" for name in COLUMNS))
    for task, experience in enumerate(benchmark.train_stream):
        if task in shown:
            found = row(strategy, [experience, benchmark.test_stream[0]], watch, takes_back, options.rounds)
            print(f"{task:>6}" + "".join(f"{found[name]:>12.2f}" for name in COLUMNS), flush=True)
        else:
            strategy.train(experience)


if __name__ == "__main__":
    main()
