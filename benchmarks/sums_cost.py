"""Measure the cost of learning and unlearning with RanPAC, by sums of features: CPU milliseconds on one thread.

    python -m benchmarks.sums_cost [--width M] [--tasks T] [--rounds N] [--device cuda]

Medians over rounds, on random features of width M, with 200 samples per task:

    add        add 64 samples to the sums of a task
    subtract   subtract one sample, and about 10,000 at once
    head       solve the regression from the sums: with a given ridge, and with a cross-validated one
    request    `strategy.unlearn` of a sample and of a task: plan, hashes of all tensors, record
    hashes     hash all tensors of the model once, for comparison
    drift      largest relative error of the inverse matrix that ACU stores, in float32 and float64, after adding and
               removing 1,000 samples one by one (Sherman-Morrison; Tang et al., 2025, arXiv 2505.12239); sums have none
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from avalanche_amnesia import AnalyticModel, RanPAC, task_benchmark
from avalanche_amnesia.bits import state_hashes

PER_TASK, MANY = 200, 10_000


def milliseconds(work: Callable[[int], object], rounds: int) -> float:
    seconds = []
    for at in range(rounds):
        began = time.process_time()
        work(at)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.process_time() - began)
    return 1e3 * median(seconds)


def of_sums(width: int, rounds: int, device: torch.device) -> dict[str, float]:
    model = AnalyticModel(None, width).to(device)
    y = torch.arange(MANY, device=device) % 10
    rows = model.rows(model.features(torch.randn(MANY, width, device=device)), y)
    sums = model.new_head(10)
    times = {"add 64": milliseconds(lambda at: sums.change(rows[64 * at : 64 * at + 64]), rounds)}
    sums = model.new_head(10)
    sums.change(rows)
    one = [rows[at : at + 1] for at in range(rounds)]
    first, rest = torch.zeros(1, dtype=torch.int64), torch.arange(MANY - rounds)  # places in what remains
    times["subtract 1"] = milliseconds(lambda at: sums.change(one[at], first), rounds)
    for ridge in (1.0, None):
        model.ridge = ridge
        name = "head, cross-validated" if ridge is None else "head"
        times[name] = milliseconds(lambda _: model._regression([sums], False), 3)
    times[f"subtract {MANY - rounds:,}"] = milliseconds(lambda _: sums.change(rows[rounds:], rest), 1)
    return times


def of_requests(width: int, tasks: int, rounds: int, device: torch.device) -> dict[str, float]:
    x = torch.randn(PER_TASK, width, generator=torch.Generator().manual_seed(0))
    y = torch.arange(PER_TASK) % 10
    benchmark = task_benchmark((x, y), (x, y), [list(range(10))] * tasks)
    model = AnalyticModel(None, width, ridge=1.0).to(device)
    strategy = RanPAC(model=model, train_mb_size=64, device=device)
    strategy.train(benchmark.train_stream)
    first = benchmark.train_stream[0]
    return {
        f"request for a sample, {tasks} tasks": milliseconds(
            lambda at: strategy.unlearn(task=0, samples=[at], data=first), rounds
        ),
        f"hashes, {tasks} tasks": milliseconds(lambda _: state_hashes(model.state_dict()), rounds),
        f"request for a task, {tasks} tasks": milliseconds(
            lambda at: strategy.unlearn([at + 1]), min(rounds, tasks - 1)
        ),
    }


def drift(width: int, dtype: torch.dtype) -> float:
    """Return the relative error of an inverse matrix after adding 1,000 samples and removing them in another order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, width, generator=generator, dtype=torch.float64)
    exact = torch.linalg.inv(x[1000:].T @ x[1000:] + torch.eye(width, dtype=torch.float64))
    inverse = exact.to(dtype)

    def change(inverse: Tensor, row: Tensor, sign: int) -> Tensor:
        turned = inverse @ row
        return inverse - sign * torch.outer(turned, turned) / (1 + sign * (row @ turned))

    for sign in (1, -1):
        for at in torch.randperm(1000, generator=generator):
            inverse = change(inverse, x[at].to(dtype), sign)
    return float((inverse.double() - exact).abs().max() / exact.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--tasks", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    figures = of_sums(options.width, options.rounds, device)
    for tasks in options.tasks:
        figures |= of_requests(options.width, tasks, options.rounds, device)
    for name, value in figures.items():
        print(f"{name:40}{value:>10.1f} ms")
    for dtype in (torch.float32, torch.float64):
        print(f"{f'drift of a recursive inverse, {dtype}':40}{drift(200, dtype):>12.1e}")


if __name__ == "__main__":
    main()
