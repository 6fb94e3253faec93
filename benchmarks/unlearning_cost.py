"""Measure the cost of unlearning a task of a large network, and of preparing counterfactual heads for it.

    python -m benchmarks.unlearning_cost [--network mlp|resnet18] [--tasks T] [--rounds N] [--threads N]

AmnesiacHAT trains a few tasks for a few steps each. Then, medians over rounds:

    plan      `strategy.plan_unlearning`: compute the changes, without making them
    unlearn   `strategy.unlearn`: compute and apply the changes; an error at its end restores the task
    hashes    part of `unlearn`: two passes over the model that look for changed tensors, without the hashes of these
    step      plain PyTorch step of the same network, for comparison
    heads     prepare the last task's counterfactual heads, and, for comparison, one forward pass over the same samples
              (with the faster of two mini-batch sizes)

``ms`` is CPU time of all threads, which depends little on other load; ``wall`` is wall-clock time.
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

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.bits import model_hashes
from avalanche_amnesia.training import AmnesiacHAT
from avalanche_amnesia.training.head_fit import BATCH_ON_CPU
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.unlearning.applying import BrokenPluginError
from benchmarks.contestants import masked
from benchmarks.measuring import plain_steps
from benchmarks.networks import N_CLASSES, NETWORKS, Network


class TakesBack(SupervisedPlugin):
    """Plugin that fails at the end of an unlearning, which restores the task, so that it can be measured repeatedly."""

    on = False

    def after_unlearning(self, strategy: Any, **kwargs: Any) -> None:
        if self.on:
            self.at = time.process_time(), time.perf_counter()
            raise InterruptedError


def trained(network: Network, batch: int, steps: int, tasks: int, samples: int = 0) -> tuple[Any, TakesBack, Any]:
    """Train some tasks; return the strategy, its :class:`TakesBack` plugin, and the last task's experience."""
    n = max(batch * steps, samples)
    x = torch.randn(n, *network.input_shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n) % N_CLASSES
    benchmark = task_benchmark((x, y), (x[:batch], y[:batch]), [list(range(N_CLASSES))] * tasks)
    takes_back = TakesBack()
    strategy = masked(AmnesiacHAT)(network, "sgd", train_mb_size=batch, train_epochs=1, plugins=[takes_back])
    for experience in benchmark.train_stream:
        strategy.train(experience)
    return strategy, takes_back, experience


def milliseconds(work: Callable[[], Any], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return 1e3 * median(seconds)


def unlearning(strategy: Any, takes_back: TakesBack, task: int, rounds: int) -> tuple[float, float]:
    """Unlearn a task in every round; return median milliseconds of CPU time and of wall-clock time."""
    takes_back.on, used, passed = True, [], []
    for _ in range(rounds):
        began = time.process_time(), time.perf_counter()
        try:
            strategy.unlearn([task])
        except BrokenPluginError:
            used.append(takes_back.at[0] - began[0])
            passed.append(takes_back.at[1] - began[1])
    takes_back.on = False
    return 1e3 * median(used), 1e3 * median(passed)


@torch.no_grad()
def heads(strategy: Any, experience: Any) -> tuple[float, float, int, int]:
    """Return milliseconds of a forward pass and of preparing a task's heads, and numbers of heads and of sources."""
    plugin, unlearning_plugin = find_plugin(strategy, CounterfactualPlugin), find_plugin(strategy, UnlearningPlugin)
    assert plugin is not None
    assert unlearning_plugin is not None
    task, model = experience.task_label, strategy.model.eval()
    strategy.experience = experience  # as at the end of the task's training
    x = experience.tensors[0]
    batches = x.split(BATCH_ON_CPU)
    forward = milliseconds(lambda: [model(part, task) for part in batches], 3)
    prepared = milliseconds(lambda: plugin.prepare(strategy, task, unlearning_plugin.ledger.unlearnable), 1)
    return forward, prepared, len(plugin.heads[task]), len(plugin.sources[task])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=list(NETWORKS), default="resnet18")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=0, help="per task at least; 0: two mini-batches")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    network = NETWORKS[options.network]
    strategy, takes_back, last = trained(network, network.batch, 2, options.tasks, options.samples)
    x = torch.randn(network.batch, *network.input_shape)
    plain = plain_steps(network, "sgd", x, torch.arange(network.batch) % N_CLASSES, network.batch)
    step = milliseconds(lambda: next(plain), options.rounds)
    hashes = 2 * milliseconds(lambda: model_hashes(strategy.model), options.rounds)
    print(f"{options.network}, {options.tasks} tasks, {options.threads} threads, medians of {options.rounds} rounds")
    print(f"{'task':8}{'plan':>10}{'unlearn':>10}{'wall':>10}{'hashes':>10}{'step':>10}{'unlearn / step':>18}")
    for task in (0, options.tasks - 1):
        plan = milliseconds(lambda task=task: strategy.plan_unlearning([task]), options.rounds)
        whole, wall = unlearning(strategy, takes_back, task, options.rounds)
        figures = "".join(f"{figure:>7.0f} ms" for figure in (plan, whole, wall, hashes, step))
        print(f"{task:<8}{figures}{whole / step:>18.2f}")
    forward, prepared, n, unlearnable = heads(strategy, last)
    print(f"heads of the last task: {prepared:.0f} ms for {n} heads, a forward pass {forward:.0f} ms: ", end="")
    print(f"{prepared / max(n, 1) / forward:.2f} passes per head", end=", ")
    print(f"{prepared / max(unlearnable, 1) / forward:.2f} per unlearnable task")


if __name__ == "__main__":
    main()
