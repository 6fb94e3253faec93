"""Measure the training cost of each strategy, relative to a plain PyTorch loop; write JSON, a table and a figure.

    make bench ARGS="--network mlp wide --only HAT AdaHAT --rounds 3"
    make bench ARGS="--whole --root DATA --optimizer adam"
    make bench ARGS="--processes --network mlp resnet18 --steps 12"
    make bench ARGS="--device cuda --bfloat16 --channels-last --network resnet18 vit --batch 256 --steps 20"

Both run the same network on the same data. The measures are explained in :mod:`benchmarks.measuring`, those of
``--whole`` in :mod:`benchmarks.whole`. ``--flush``, a control, lets the processor treat subnormal numbers as 0.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch

from avalanche_amnesia.unit_graph import ModelError
from benchmarks import processes_cost, whole
from benchmarks.contestants import CONTESTANTS
from benchmarks.measuring import Figure, measure
from benchmarks.networks import NETWORKS
from benchmarks.peers import PeerMissingError, time_clarena
from benchmarks.place import CPU, Place

SPREAD = ("step", "loop", "evaluation")
"""Measures with median and quartiles; ``SINGLE`` has those with one value per training."""
SINGLE = ("start", "end", "unlearn first", "unlearn later", "memory", "trajectory", "subnormals")

IMPORTS = "; ".join(
    (
        "import time",
        "began = time.process_time()",
        "import avalanche.training",
        "between = time.process_time()",
        "import {}",
        "print(between - began, time.process_time() - between)",
    )
)


def import_times(rounds: int) -> dict[str, float]:
    """Return median CPU milliseconds of imports in new processes; ours without the time of ``avalanche.training``."""
    rooms = {"avalanche_amnesia": "avalanche_amnesia", "AmnesiacHAT": "avalanche_amnesia.training.amnesiac_hat"}
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, module in rooms.items():
            command = [sys.executable, "-W", "ignore", "-c", IMPORTS.format(module)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            found.setdefault("avalanche.training", []).append(float(out[0]))
            found.setdefault(f"{name}, behind it", []).append(float(out[1]))
    return {name: 1e3 * median(values) for name, values in found.items()}


def table(rows: Sequence[dict[str, Any]], imports: dict[str, float]) -> str:
    """Return all results as Markdown: a table per network, import times, and explanations of the measures."""
    lines = ["# Cost beside a plain PyTorch loop", ""]
    for title in dict.fromkeys(row["title"] for row in rows):
        lines += [f"## {title}", "", "| method | " + " | ".join((*SPREAD, *SINGLE)) + " |"]
        lines += ["|---" * (1 + len(SPREAD) + len(SINGLE)) + "|"]
        for row in (row for row in rows if row["title"] == title):
            cells = [str(Figure(*row[name])) if name in row else "–" for name in SPREAD]
            cells += [f"{row[name][0]:.2f}" if name in row else "–" for name in SINGLE]
            lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [f"Import of `{name}`: {value:.0f} ms of CPU time." for name, value in imports.items()]
    return "\n".join([*lines, "", inspect.cleandoc(measure.__doc__ or "")]) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw bars of all methods' step times with quartiles, a panel per network, three panels in a row."""
    titles = list(dict.fromkeys(row["title"] for row in rows))
    width, height = min(3, len(titles)), math.ceil(len(titles) / 3)
    figure, axes = plt.subplots(height, width, figsize=(5 * width, 4 * height), squeeze=False, layout="constrained")
    for axis in axes.flat[len(titles) :]:
        axis.set_axis_off()
    for axis, title in zip(axes.flat, titles, strict=False):
        shown = [row for row in rows if row["title"] == title][::-1]
        middle, low, high = zip(*(row["step"] for row in shown), strict=True)
        ends = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
        axis.barh([row["method"] for row in shown], middle, xerr=ends, color="#4c72b0", ecolor="#333333")
        axis.axvline(1, color="#333333", linewidth=1)
        axis.set(title=title.replace(", 1 thread", "\n1 thread"), xlabel="step / plain step")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def about() -> dict[str, Any]:
    """Return the torch version, the processor and the current time, to store with the results."""
    return {"torch": torch.__version__, "processor": platform.processor(), "measured": time.strftime("%Y-%m-%d %H:%M")}


def whole_runs(options: argparse.Namespace) -> None:
    """Measure whole runs (option ``--whole``), and write the results as JSON and as a Markdown table."""
    found: dict[str, Any] = {"about": about()}
    text = ["# Whole runs beside a plain PyTorch loop", "", inspect.cleandoc(whole.__doc__ or ""), ""]
    for name, tasks in product(options.network, options.tasks):
        methods = options.only or whole.METHODS
        rows = whole.measure_whole_runs(name, methods, tasks, options.optimizer, options.rounds, options.root)
        title = f"{tasks} tasks" if name == "mlp" else f"{name}, {tasks} tasks"
        found[title] = rows
        text.append(whole.table(title, rows))
        (options.out / "whole.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "whole.md").write_text("\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--network", nargs="+", choices=list(NETWORKS), default=["mlp"])
    parser.add_argument("--rounds", type=int, default=3, help="epochs measured for steps, and as many for the loop")
    parser.add_argument("--batch", nargs="+", type=int, help="by default 64 for the MLPs, 16 for the others")
    parser.add_argument("--steps", type=int, help="per epoch; by default of the network")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), help="by default all")
    parser.add_argument("--whole", action="store_true", help="whole runs, on the CPU, in place of steps")
    parser.add_argument("--processes", action="store_true", help="one training on 1 and 2 processes, in place of steps")
    parser.add_argument("--tasks", nargs="+", type=int, default=[5, 20], help="of whole runs")
    parser.add_argument("--root", type=Path, help="folder that holds MNIST/raw, for whole runs; without it digits")
    parser.add_argument("--peer", choices=["clarena"], help="time it too, in an environment of its own, SGD alone")
    parser.add_argument("--flush", action="store_true", help="let the processor take subnormal numbers for 0")
    parser.add_argument("--device", type=torch.device, default=CPU.device, help="such as cuda, whose events are timed")
    parser.add_argument("--bfloat16", action="store_true", help="forwards of all networks run under autocast")
    parser.add_argument("--channels-last", action="store_true", help="the layout of images and their weights")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="directory of the results")
    options = parser.parse_args()
    place = Place(options.device, options.bfloat16, options.channels_last)
    if options.peer and place != CPU:
        parser.error(f"--peer {options.peer} is timed on the CPU, in float32: leave it out for {place}")
    torch.set_num_threads(1)
    torch.set_flush_denormal(options.flush)
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.whole:
        whole_runs(options)
        return
    if options.processes:
        methods, steps = options.only or processes_cost.METHODS, options.steps or 12
        text = processes_cost.table(options.network, methods, steps, options.rounds, options.batch)
        (options.out / "processes.md").write_text(text)
        print(text)
        return
    rows: list[dict[str, Any]] = []
    imports = import_times(options.rounds)
    for name in options.network:
        network = NETWORKS[name]
        for batch in options.batch or [network.batch]:
            steps = options.steps or network.steps
            title = f"{name}, batch {batch}, {options.optimizer}, {place}, {options.rounds} × {steps} steps"
            if options.peer and options.optimizer == "sgd":
                try:
                    peers = time_clarena(name, network, batch, steps, options.rounds)
                    rows += [{"title": title, "method": method, "step": step} for method, step in peers.items()]
                except PeerMissingError as error:
                    print(f"skipped: {error}")
            for method in options.only or CONTESTANTS:
                try:
                    found = measure(method, network, options.optimizer, batch, steps, options.rounds, place)
                except ModelError as error:  # as WSN's, whose masks don't cover a ViT's class token
                    print(f"skipped: {method} on {name}: {error}")
                    continue
                rows.append({"title": title, "method": method, **found})
                print(title, method, "step", found["step"], "loop", found["loop"], flush=True)
                results = {"about": about(), "imports": imports, "rows": rows}
                (options.out / "results.json").write_text(json.dumps(results, indent=1))
                (options.out / "results.md").write_text(table(rows, imports))
    draw(rows, options.out / "steps.png")


if __name__ == "__main__":
    main()
