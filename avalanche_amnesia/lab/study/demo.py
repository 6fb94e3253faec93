"""The demo: four strategies learn digits and unlearn on request; the results are a table and a report."""

import textwrap
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from avalanche_amnesia.audit.words import tasks_in_words
from avalanche_amnesia.lab.executors.jobs import Executor
from avalanche_amnesia.lab.report.measures import MEANINGS, MEASURES
from avalanche_amnesia.lab.report.page import report_page
from avalanche_amnesia.lab.report.reading import Entry, Run, spread
from avalanche_amnesia.lab.report.tables import csv_of
from avalanche_amnesia.lab.report.verdicts import verdicts_as_text
from avalanche_amnesia.lab.report.wording import MISSING, without_unit
from avalanche_amnesia.lab.study import settings
from avalanche_amnesia.lab.study.building import build
from avalanche_amnesia.lab.study.experiment import cells_of
from avalanche_amnesia.lab.study.sweep import run_cell, train_references
from avalanche_amnesia.logging.wandb import WandBLogger
from avalanche_amnesia.saving.files import replace_file
from avalanche_amnesia.text_table import text_table

REQUESTS: dict[int, list[int]] = {1: [0], 4: [1, 4]}
"""Finished task → tasks to unlearn. The second request frees more capacity than its task used, so capacity rises."""
METHODS = {
    "Weight pools": settings.MethodSettings("DisjointSubnets", lr=4e-3, options={"isolation": "planned"}),
    "AmnesiacHAT": settings.MethodSettings("AmnesiacHAT"),
    "EWC": settings.MethodSettings("EWC", "SGD", 0.05, {"ewc_lambda": 1e4}),
    "LwF": settings.MethodSettings("LwF", "SGD", 0.05, {"alpha": 1.0, "temperature": 2.0}),
}
"""Name → method and its settings. With weight pools every task has its own weights, so unlearning is exact. EWC and
LwF train with SGD because they forget far more under Adam (EWC on Split Digits: average accuracy .93 with SGD, .60
with Adam, each with the better of the penalties 1e2 and 1e4)."""
_WIDTH = 60


def demo_experiment(on_mnist: bool, seed: int, epochs: int | None) -> settings.Experiment:
    """Return the experiment of the demo, on MNIST if ``on_mnist``, else on scikit-learn's digits."""
    default, batch_size = (2, 64) if on_mnist else (20, 32)
    return settings.Experiment(
        "demo",
        METHODS,
        {"requests": settings.ScenarioSettings("listed", {"requests": REQUESTS})},
        [seed],
        settings.StreamSettings("SplitMNIST" if on_mnist else "SplitDigits"),
        training=settings.TrainingSettings(default if epochs is None else epochs, batch_size),
        floors=["order", "seed"],
    )


def run_demo(
    out: Path,
    say: Callable[[str], None],
    executor: Executor,
    store: Path,
    *,
    data_root: str | None = None,
    seed: int = 0,
    epochs: int | None = None,
) -> list[Run]:
    """Run the demo, write its results (report, table, logs) to a folder, and return its runs.

    The executor trains references into the store at the same time.
    """
    cells = cells_of(experiment := demo_experiment(data_root is not None, seed, epochs))
    build(cells[0], data_root)  # missing data raises before anything is written
    out.mkdir(parents=True, exist_ok=True)
    asked = (f"{tasks_in_words(tasks)} after task {after}" for after, tasks in REQUESTS.items())
    say(f"{experiment.stream.name}, 5 tasks, {experiment.training.epochs} epochs each, seed {seed}")
    say(f"to unlearn: {'; '.join(asked)}")
    runs = []
    # "same" last: on two cores this process trains these references, and so works as long as the other.
    for kinds, cell in product((("full", *experiment.floors), ("same",)), cells):
        executor.submit(train_references, [cell], kinds, store, data_root)
    for cell in cells:
        with WandBLogger(name=cell.method, group="demo", dir=str(out), mode="offline", config={"seed": seed}) as logger:
            runs.append(run_cell(cell, out / "runs" / cell.method, store, data_root, say, [logger]))
    replace_file(out / "report.html", report_page(runs).encode())
    replace_file(out / "results.csv", csv_of(runs))
    say(f"\nAt the end of the stream:\n\n{_final_text(runs)}\n\nEverything lies in {out}:\n{_FILES}")
    say(f"Open {out / 'report.html'} to see what was forgotten.")
    return runs


_FILES = """\
  report.html  all of it in one page, with charts
  runs/        logs: amnesia report, amnesia sync
  results.csv  the numbers; same seed, same bytes
  wandb/       offline runs, with masks, capacity and accuracies
"""


def _final_text(runs: Sequence[Run]) -> str:
    """Return text for the end of the demo: a verdict on each run, a table of final metrics, and their explanations."""
    rows = []
    for measure in MEASURES.values():
        values = [measure.get(run.last) for run in runs]
        rows.append([measure.title, *(MISSING if v is None else without_unit(measure.words(v)) for v in values)])
    for what in ("unlearn", "retrain"):
        means = [spread(getattr(cost, what) for cost in run.costs) for run in runs]
        rows.append([f"seconds to {what}", *(MISSING if mean is None else f"{mean.mean:.2g}" for mean in means)])
    table = text_table(["", *(run.name for run in runs)], rows)
    meanings = {MEASURES[key].title: meaning for key, meaning in MEANINGS.items()}
    told = [textwrap.fill(f"{name}: {text}", _WIDTH, subsequent_indent="  ") for name, text in meanings.items()]
    return "\n".join([verdicts_as_text([Entry(run.name, [run]) for run in runs]), "", table, "", *told])
