"""Measure one training on 1 and on 2 processes (gloo, one thread each): speed-up, its bound, cost of the reduction.

    make bench ARGS="--processes --network mlp resnet18 --steps 12"
    make bench ARGS="--processes --network resnet18 --batch 128 --only DisjointSubnets"

One and two processes train the same two tasks in turn, with one core per process. Times are wall-clock times of the
second task's steps, medians over rounds. If other jobs run on the machine, only the columns with CPU times are
meaningful. The bound is the speed-up of two independent processes that each train on half of the mini-batch; no
data-parallel training can be faster. The time of the reduction is the time in `sum_all`, which includes waiting for the
slower process.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise, product
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
    """Plugin that records wall-clock and CPU time at the start of each step of the last task."""

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self.began: list[tuple[float, float]] = []

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.began.append((time.perf_counter(), time.process_time()))


def measured(name: str, method: str, steps: int, batch: int) -> dict[str, float]:
    """Train two tasks; return milliseconds per step (wall clock, CPU, reduction), and numbers sent per reduction."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    x, y = torch.randn(2 * steps * batch, *network.input_shape), torch.arange(2 * steps * batch) % 20
    clock, spent, sent = Clock(), [], []
    sum_all = data_parallel.sum_all

    def timed(values: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        sum_all(values)
        spent.append(time.perf_counter() - began)
        sent.append(len(values))
        return values

    data_parallel.sum_all = timed
    strategy = CONTESTANTS[method](network, "adam", train_mb_size=batch, train_epochs=1, plugins=[clock], seed=0)
    for experience in task_benchmark((x, y), (x[:40], y[:40]), [list(range(10)), list(range(10, 20))]).train_stream:
        spent.clear()
        strategy.train(experience)
    walls, cpus = zip(*clock.began[2:], strict=True)
    return {
        "step": 1e3 * median(after - before for before, after in pairwise(walls)),
        "cpu": 1e3 * median(after - before for before, after in pairwise(cpus)),
        "reduction": 1e3 * sum(spent) / max(1, len(clock.began)),
        "sent": max(sent, default=0),
    }


def _join(rank: int, n: int, place: str | None, results: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    if place is not None:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=n)
    results.put((rank, measured(*arguments)))
    if place is not None:
        dist.barrier()


def at_once(n: int, *arguments: Any, together: bool) -> dict[str, float]:
    """Measure ``n`` processes that train one model ``together`` or one model each; return the first one's results."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        place = str(Path(folder) / "group") if together else None
        group = [context.Process(target=_join, args=(rank, n, place, results, arguments)) for rank in range(n)]
        for process in group:
            process.start()
        found = dict(results.get() for _ in group)
        for process in group:
            process.join()
    return found[0]


def table(
    networks: Sequence[str], methods: Sequence[str], steps: int, rounds: int, batches: Sequence[int] | None = None
) -> str:
    """Measure all networks and methods, and return a Markdown page; ``batches``: default ``LARGE_BATCH``."""
    lines = [f"# One training on two processes\n\n{inspect.cleandoc(__doc__ or '')}\n"]
    lines += [f"{platform.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n"]
    lines += [
        "| network, mini-batch | method | ms a step: alone | 2 processes | speed-up | its bound | both in CPU time"
        " | reduction | numbers sent |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cells = [(name, batch) for name in networks for batch in batches or [LARGE_BATCH[name]]]
    for (name, batch), method in product(cells, methods):
        whole, halves, group = [], [], []
        for _ in range(rounds):
            whole.append(at_once(1, name, method, steps, batch, together=False))
            halves.append(at_once(2, name, method, steps, batch // 2, together=False))
            group.append(at_once(2, name, method, steps, batch, together=True))
        alone, half, together = (
            {key: median(one[key] for one in of) for key in of[0]} for of in (whole, halves, group)
        )
        gains = [alone[key] / of[key] for key in ("step", "cpu") for of in (together, half)]
        shown = [f"{name}, {batch}", method, f"{alone['step']:.1f}", f"{together['step']:.1f}"]
        shown += [f"{gains[0]:.2f}", f"{gains[1]:.2f}", f"{gains[2]:.2f}, {gains[3]:.2f}"]
        shown += [f"{together['reduction']:.1f}", f"{together['sent']:,.0f}"]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"
