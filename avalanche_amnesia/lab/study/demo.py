"""The main job: real digits, a stream with requests, four strategies that forget, tables, figures and a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loky
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from avalanche_amnesia.audit.words import tasks_in_words
from avalanche_amnesia.contrib.metrics.masks_figure import masks_figure
from avalanche_amnesia.contrib.metrics.pictures import as_png, capacity_figure
from avalanche_amnesia.evaluation.figures import Cell, matrix_figure
from avalanche_amnesia.lab.report.page import report_page
from avalanche_amnesia.lab.report.reading import Moment, Run, read_run
from avalanche_amnesia.lab.report.tables import csv_of
from avalanche_amnesia.lab.report.terminal import cost_table, events_table, forgotten_table, remaining_table
from avalanche_amnesia.lab.runs.measuring import measure_run
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.lab.study.building import build
from avalanche_amnesia.lab.study.grid import cells_of
from avalanche_amnesia.lab.study.settings import (
    Experiment,
    MethodSettings,
    ScenarioSettings,
    StreamSettings,
    TrainingSettings,
)
from avalanche_amnesia.logging.wandb import WandBLogger
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.saving.files import replace_file

REQUESTS: dict[int, list[int]] = {1: [0], 4: [1, 4]}
"""After a task, the tasks to unlearn. The second request gives back more than the task before it took: capacity
rises."""
METHODS = {
    "AmnesiacHAT": MethodSettings("AmnesiacHAT"),
    "AmnesiacHAT pools": MethodSettings("AmnesiacHAT", options={"isolation": "pools"}),
    "EWC": MethodSettings("EWC", "SGD", 0.05, {"ewc_lambda": 1e4}),
    "LwF": MethodSettings("LwF", "SGD", 0.05, {"alpha": 1.0, "temperature": 2.0}),
}
"""Name → method and its settings. With pools every task has a fifth of the network to itself, so that unlearning it is
exact. EWC and LwF train with SGD, under which they forget far less than under Adam (EWC on Split Digits: .93 against
.60 average accuracy, with the best of the penalties 1e2 and 1e4)."""


def demo_experiment(on_mnist: bool, seed: int, epochs: int | None) -> Experiment:
    """Settings of the main job: the embedded digits, or MNIST."""
    return Experiment(
        "demo",
        METHODS,
        {"requests": ScenarioSettings("listed", {"requests": REQUESTS})},
        [seed],
        StreamSettings("SplitMNIST" if on_mnist else "SplitDigits"),
        training=TrainingSettings(epochs or (2 if on_mnist else 20), 64 if on_mnist else 32),
        floors=["order", "seed"],
    )


def run_demo(
    out: Path,
    *,
    data_root: str | None = None,
    seed: int = 0,
    epochs: int | None = None,
    store: Path | None = None,
    console: Console | None = None,
) -> list[Run]:
    """Run the main job and leave its results in a folder."""
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    console = console or Console()
    torch.set_num_threads(1)  # faster for networks of this size, and the same bits whatever the number of cores
    experiment = demo_experiment(data_root is not None, seed, epochs)
    cells = cells_of(experiment)
    built = [build(cell, data_root) for cell in cells]
    data = "Split Digits" if data_root is None else "Split MNIST"
    kept = None if store is None else RunStore(store)
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"{data}, 5 tasks, {experiment.training.epochs} epochs each, seed {seed}")
    asked = (f"{tasks_in_words(tasks)} after task {after}" for after, tasks in REQUESTS.items())
    console.print(f"to unlearn: {'; '.join(asked)}")
    settings = {"data": data, "requests": REQUESTS, "seed": seed, "budget": vars(experiment.training)}
    strategies: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description:18}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=600) as progress:
        bar = progress.add_task("starting", total=len(cells) * experiment.stream.n_tasks)
        for cell, (benchmark, make) in zip(cells, built, strict=True):
            name = cell.method
            progress.update(bar, description=name)
            with WandBLogger(name=name, group="demo", dir=str(out), mode="offline", config={"seed": seed}) as logger:
                strategies[name] = measure_run(
                    name,
                    make,
                    benchmark,
                    out / "runs" / name,
                    settings=settings,
                    noise_floor=experiment.floors,
                    loggers=[logger],
                    progress=lambda step: progress.update(bar, advance=1),
                    store=kept,
                    workers=loky.cpu_count() - 1,
                )
    runs = [read_run(out / "runs" / name) for name in METHODS]
    for run in runs:
        console.print(events_table(run))
    for table in (forgotten_table, remaining_table, cost_table):
        console.print(table(runs))
    console.print(_LEGEND, highlight=False)
    replace_file(out / "report.html", report_page(runs).encode())
    replace_file(out / "results.csv", csv_of(runs))
    masked = next(run for run in runs if isinstance(strategies[run.name].model, MaskedModel))
    figures = _matrix_and_capacity(runs, masked) | {"masks.png": masks_figure(strategies[masked.name].model.masks)}
    for name, figure in figures.items():
        replace_file(out / name, as_png(figure))
    console.print(f"\nEverything lies in {out}:", soft_wrap=True)
    for name, what in _FILES.items():
        console.print(f"  {name:20} {what}")
    console.print(f"\nOpen {out / 'report.html'} to see what was forgotten.", soft_wrap=True)
    return runs


_LEGEND = """\
acc.   mean test accuracy of the remaining tasks
JSD    bits between the features of the unlearned tasks' data
       here and in a model that never saw them, through their
       own mask; blind to small residues: see head
order  the same between two models that never saw them, one
       trained in another data order; ratio: JSD / order
seed   the same, one trained from another seed
head   accuracy on the unlearned tasks through the head and
       mask they had: chance is 0.5; better than that, and
       than ref., is a trace of them
ref.   what the same heads read from a model that never saw
       the tasks
AD     accuracy minus that of a model that never unlearned
ctrl   what that model gains with its heads fitted again: only
       what AD has beyond it is due to unlearning
cap.   network capacity, 1 is all free
KiB    trajectory kept, by which tasks can be taken out
claim  exact: equal to the retrained model, bit for bit;
       appr.: approximate, see head and JSD"""
_FILES = {
    "report.html": "all of it in one page, with charts",
    "runs/": "logs: amnesia report, amnesia sync",
    "results.csv": "the numbers; same seed, same bytes",
    "accuracy_matrix.png": "accuracy after every task",
    "masks.png": "units that remaining tasks use",
    "capacity.png": "capacity and trajectory",
    "wandb/": "offline runs: wandb sync <run>",
}


def _matrix_and_capacity(runs: Sequence[Run], masked: Run) -> dict[str, Figure]:
    moments = masked.moments
    tasks = [moment.task for moment in moments]
    capacity, sizes = ([moment.number(name) or 0.0 for moment in moments] for name in ("Capacity", "TrajectoryBytes"))
    return {
        "accuracy_matrix.png": matrix_figure(
            {run.name: [[_cell(moment, task) for task in tasks] for moment in run.moments] for run in runs},
            rows=tasks,
            columns=tasks,
            row_label="after task",
            column_label="tested on task",
            note="framed: unlearned, read through the head and mask it had; near chance (50) is good",
        ),
        "capacity.png": capacity_figure(
            [
                ", ".join([f"task {each.task}", *(f"unlearned {gone}" for gone in each.unlearned_now)])
                for each in moments
            ],
            capacity,
            sizes,
            [bool(m.unlearned_now) for m in moments],
        ),
    }


def _cell(moment: Moment, task: int) -> Cell | None:
    accuracy = moment.accuracies.get(task)
    return None if accuracy is None else Cell(accuracy, framed=task in moment.unlearned)
