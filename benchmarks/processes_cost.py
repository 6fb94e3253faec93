"""One training on 1 and 2 processes (gloo), one thread each: speed-up, cost of the reduction, numbers sent.

    make bench ARGS="--processes --network mlp resnet18 --steps 12"

Both sizes of the group train the same two tasks in turn, a process for each core. Times are wall-clock times of the
second task's steps, medians over rounds: with another job on the machine they mean nothing. The time of the reduction
is that in `summed`, in which the faster process also waits for the slower one.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from avalanche.core import SupervisedPlugin

from avalanche_amnesia import task_benchmark
from avalanche_amnesia.training import data_parallel
from benchmarks.contestants import CONTESTANTS
from benchmarks.networks import NETWORKS

METHODS = ("HAT", "AmnesiacHAT", "WSN", "DisjointSubnets")
LARGE_BATCH = {"mlp": 256, "resnet18": 64}


class Clock(SupervisedPlugin):
    """Wall-clock time of each step of the last task."""

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self.began: list[float] = []

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.began.append(time.perf_counter())


def measured(name: str, method: str, steps: int) -> dict[str, float]:
    """Train two tasks; return milliseconds per step, and of these in the reduction, and numbers sent per step."""
    network, batch = NETWORKS[name], LARGE_BATCH[name]
    torch.manual_seed(0)
    x, y = torch.randn(2 * steps * batch, *network.input_shape), torch.arange(2 * steps * batch) % 20
    clock, spent, sent = Clock(), [], []
    summed = data_parallel.summed

    def timed(values: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        summed(values)
        spent.append(time.perf_counter() - began)
        sent.append(len(values))
        return values

    data_parallel.summed = timed
    strategy = CONTESTANTS[method](network, "adam", train_mb_size=batch, train_epochs=1, plugins=[clock], seed=0)
    for experience in task_benchmark((x, y), (x[:40], y[:40]), [list(range(10)), list(range(10, 20))]).train_stream:
        spent.clear()
        strategy.train(experience)
    took = [after - before for before, after in zip(clock.began, clock.began[1:], strict=False)][2:]
    return {
        "step": 1e3 * median(took),
        "reduction": 1e3 * sum(spent) / max(1, len(clock.began)),
        "sent": max(sent, default=0),
    }


def _join(rank: int, n: int, place: str, results: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    if n > 1:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=n)
    results.put((rank, measured(*arguments)))
    if n > 1:
        dist.barrier()


def in_group(n: int, *arguments: Any) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        group = [
            context.Process(target=_join, args=(rank, n, str(Path(folder) / "group"), results, arguments))
            for rank in range(n)
        ]
        for process in group:
            process.start()
        found = dict(results.get() for _ in group)
        for process in group:
            process.join()
    return found[0]


def table(networks: Sequence[str], methods: Sequence[str], steps: int, rounds: int) -> str:
    """Measure all, and return a table of it as Markdown."""
    lines = [f"# One training on two processes\n\n{inspect.cleandoc(__doc__ or '')}\n"]
    lines += [f"{platform.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n"]
    lines += ["| network, mini-batch | method | ms a step: alone | 2 processes | speed-up | reduction | numbers sent |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, method in product(networks, methods):
        found = [[in_group(n, name, method, steps) for n in (1, 2)] for _ in range(rounds)]
        alone, together = (median(each[n]["step"] for each in found) for n in (0, 1))
        reduction = f"{median(each[1]['reduction'] for each in found):.1f}"
        cells = [f"{name}, {LARGE_BATCH[name]}", method, f"{alone:.1f}", f"{together:.1f}", f"{alone / together:.2f}"]
        cells += [reduction, f"{found[0][1]['sent']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
