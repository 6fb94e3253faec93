"""The main job: real digits, a stream with requests, three strategies that forget, tables and figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import avalanche
import torch
import wandb
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import avalanche_amnesia
from avalanche_amnesia.benchmarks.digits import SplitDigits
from avalanche_amnesia.benchmarks.mnist import SplitMNIST
from avalanche_amnesia.benchmarks.requests import with_unlearning
from avalanche_amnesia.logging.figures import accuracy_figure, capacity_figure, masks_figure
from avalanche_amnesia.logging.wandb import WandBLogger
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.runs.contestants import Budget, contestants
from avalanche_amnesia.runs.observation import Run, observe
from avalanche_amnesia.runs.tables import cost_table, events_table, final_table

REQUESTS: dict[int, list[int]] = {1: [0], 3: [1], 4: [4]}


def run_demo(
    out: Path, *, data_root: str | None = None, seed: int = 0, epochs: int | None = None, console: Console | None = None
) -> list[Run]:
    """Run the main job and leave its results in a folder.

    Args:
        out: the folder; made if it does not exist.
        data_root: where MNIST lies (``MNIST/raw`` below it); None: the embedded digits.
        seed: of everything.
        epochs: per task; by default 20 on the digits, 2 on MNIST.
        console: where to print.

    Raises:
        DataNotFoundError: if ``data_root`` holds no MNIST.
        ValueError: for fewer than one epoch.
    """
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    console = console or Console()
    torch.set_num_threads(1)  # faster for networks of this size, and the same bits whatever the number of cores
    stream = SplitDigits(seed=seed) if data_root is None else SplitMNIST(seed=seed, root=data_root)
    benchmark = with_unlearning(stream, REQUESTS)
    data = "Split Digits" if data_root is None else "Split MNIST"
    budget = Budget(
        in_features=64 if data_root is None else 784,
        epochs=epochs or (20 if data_root is None else 2),
        batch_size=32 if data_root is None else 64,
        seed=seed,
    )
    makers = contestants(budget)
    out.mkdir(parents=True, exist_ok=True)
    console.print(
        f"{data}, 5 tasks, requests {REQUESTS} (after task: tasks to unlearn), {budget.epochs} epochs, seed {seed}"
    )
    runs: list[Run] = []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=len(makers) * len(benchmark.train_stream))
        for name, make in makers.items():
            progress.update(bar, description=f"{name} and its references")
            with WandBLogger(name=name, group="demo", dir=str(out), mode="offline", config={"seed": seed}) as logger:
                run = observe(
                    name, make, benchmark, loggers=[logger], progress=lambda step: progress.update(bar, advance=1)
                )
            runs.append(run)
    for run in runs:
        console.print(events_table(run))
    console.print(final_table(runs))
    console.print(cost_table(runs))
    console.print(_LEGEND, highlight=False)
    _write(out, runs, {"data": data, "requests": REQUESTS, "seed": seed, "budget": vars(budget)})
    console.print(f"\nEverything lies in {out}:")
    for name, what in _FILES.items():
        console.print(f"  {name:22} {what}")
    return runs


_LEGEND = """\
acc.    mean test accuracy of the remaining tasks
head    accuracy on the unlearned tasks through the head and mask they had:
        chance is 0.5; better than that, and than ref., is a trace of them
ref.    what the same heads read from a model that never saw the tasks
JSD     bits between the features of the unlearned tasks' data here and in a
        model that never saw them, through their own mask or the others' (rem)
floor   the same between two models that never saw them, one of them trained in
        another data order (o) or from another seed (s)
AD      accuracy minus that of a model that never unlearned: + is a gain
cap.    network capacity, 1 is all free; KiB: trajectory kept
unl.ms  milliseconds to unlearn; retr.s: seconds to retrain without the tasks
claim   exact: equal to the retrained model, bit for bit; appr.: see JSD"""
_FILES = {
    "results.json": "the numbers above; the same bytes for the same seed",
    "timings.json": "the seconds",
    "accuracy_matrix.png": "accuracy on every task after every task",
    "masks.png": "units that the remaining tasks use",
    "capacity.png": "capacity and trajectory over the stream",
    "wandb/": "offline runs, one per strategy: wandb sync <run>",
}


def _write(out: Path, runs: Sequence[Run], settings: dict[str, Any]) -> None:
    versions = {
        "avalanche-amnesia": avalanche_amnesia.__version__,
        "avalanche-lib": avalanche.__version__,
        "torch": torch.__version__,
        "wandb": wandb.__version__,
    }
    results = {
        "settings": settings,
        "versions": versions,
        "strategies": {
            run.name: {"events": [seen.to_dict() for seen in run.observations], "unlearnings": run.records}
            for run in runs
        },
    }
    _write_json(out / "results.json", results)
    timings = {run.name: [vars(timing) for timing in run.timings] for run in runs}
    _write_json(out / "timings.json", timings)
    matrices = {run.name: [seen.accuracy | seen.unlearned_accuracy for seen in run.observations] for run in runs}
    unlearned = [seen.unlearned for seen in runs[0].observations]
    accuracy_figure(matrices, unlearned).savefig(out / "accuracy_matrix.png", dpi=130, bbox_inches="tight")
    masked = next(run for run in runs if isinstance(run.strategy.model, MaskedModel))
    masks = {
        t: {layer: m.tolist() for layer, m in of_task.items()} for t, of_task in masked.strategy.model.masks.items()
    }
    masks_figure(masks).savefig(out / "masks.png", dpi=130)
    seen = masked.observations
    capacity_figure(
        [s.capacity or 0.0 for s in seen], [s.trajectory_bytes or 0 for s in seen], [s.unlearned_now for s in seen]
    ).savefig(out / "capacity.png", dpi=130)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
