"""Run one cell (method, scenario, seed) of an experiment, or all cells as jobs that share retrained models."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import avalanche
import torch
import yaml
from avalanche.logging import BaseLogger

from avalanche_amnesia.benchmarks.requests import UnlearningRequest
from avalanche_amnesia.evaluation.references import Expected, References
from avalanche_amnesia.lab.executors.jobs import Executor, Job, OnDone, run_jobs
from avalanche_amnesia.lab.report.reading import Run, read_run
from avalanche_amnesia.lab.report.tables import csv_of
from avalanche_amnesia.lab.runs.measuring import measure_run
from avalanche_amnesia.lab.runs.run_plan import RunPlan, plan_paths, reference_paths
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.lab.study.building import build, check_names
from avalanche_amnesia.lab.study.experiment import RESULTS, SETTINGS, all_settings, folder_of, is_done, mark_of
from avalanche_amnesia.lab.study.settings import Cell
from avalanche_amnesia.saving.files import replace_file


@contextmanager
def _as_worker() -> Iterator[None]:
    """Inside the context: use one thread and (with a GPU) deterministic algorithms, and hide Avalanche's warnings."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    host = Path(avalanche.__file__).parent
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"avalanche\.")
        show = warnings.showwarning

        # A filter is not enough: Avalanche inserts its own filter first at each call of a deprecated function.
        def show_others(message: Any, category: type[Warning], filename: str, *where: Any, **more: Any) -> None:
            if not (issubclass(category, DeprecationWarning) and host in Path(filename).parents):
                show(message, category, filename, *where, **more)

        warnings.showwarning = show_others
        try:
            torch.set_num_threads(1)
            if torch.cuda.is_available():
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True)
            yield
        finally:  # because a run may be one cell of a notebook
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(strict, warn_only=only_warn)


@_as_worker()
def run_cell(
    cell: Cell,
    folder: Path,
    store: Path | None = None,
    root: str | Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
    loggers: Sequence[BaseLogger] = (),
) -> Run:
    """Run one method on one stream with its requests to unlearn; evaluate after every task, and write the results."""
    benchmark, make = build(cell, root)
    kept = None if store is None else RunStore(store)
    stream, floors = cell.experiment.stream, cell.experiment.floors
    requests = {e.task_label: [_request_values(r) for r in e.requests] for e in benchmark.train_stream if e.requests}
    settings = all_settings(cell) | {"data": f"{stream.name}, {stream.n_tasks} tasks", "requests": requests}
    beside: dict[str, Any] = {"loggers": loggers, "progress": progress, "store": kept}
    measure_run(cell.method, make, benchmark, folder, settings=settings, noise_floor=floors, **beside)
    run = read_run(folder)
    replace_file(folder / RESULTS, csv_of([run]))
    saved = yaml.safe_dump(mark_of(cell, folder), sort_keys=False, allow_unicode=True)
    replace_file(folder / SETTINGS, saved.encode())  # last: this file marks the results as complete
    return run


def _request_values(request: UnlearningRequest) -> Any:
    """Return an unlearning request as plain values: a list of tasks, or a dict of a task and its samples or classes."""
    parts = {name: list(getattr(request, name)) for name in ("samples", "classes") if getattr(request, name)}
    return {"task": request.tasks[0], **parts} if parts else list(request.tasks)


@_as_worker()
def train_references(
    cells: Iterable[Cell], kinds: Iterable[Expected], store: Path, root: str | Path | None = None
) -> int:
    """Train the references (retrained models) that some runs need, each once; return the number of trainings."""
    kept, n = RunStore(store), 0
    for cell in cells:
        benchmark, make = build(cell, root)
        references = References(make, benchmark, store=kept)
        references.expect(*kinds)
        for variant, path in references.expected():
            references.train_along(path, variant)
        n += references.trainings
    return n


def jobs_of(cells: Sequence[Cell], out: Path, store: Path, root: Path | None = None) -> list[Job]:
    """Return the jobs for an experiment's runs that have no results: for each method and seed, references, then runs.

    One job trains the references ``same`` and ``full`` of all scenarios, one job those of each noise floor.
    """
    out, store, root = out.absolute(), store.absolute(), None if root is None else root.absolute()
    jobs: list[Job] = []
    missing = [cell for cell in cells if not is_done(cell, folder_of(cell, out))]
    of = attrgetter("method", "seed")
    for (method, seed), group in groupby(sorted(missing, key=of), key=of):
        runs, needs = list(group), []
        kinds: list[tuple[Expected, ...]] = [("same", "full"), *((floor,) for floor in runs[0].experiment.floors)]
        for wanted in kinds:
            name = f"{method}, seed {seed}: references ({', '.join(wanted)})"
            jobs.append(Job(name, train_references, (tuple(runs), wanted, store, root)))
            needs.append(name)
        for cell in runs:
            name = f"{method}, seed {seed}: {cell.scenario}"
            jobs.append(Job(name, run_cell, (cell, folder_of(cell, out), store, root), frozenset(needs)))
    return jobs


def sweep(
    cells: Sequence[Cell],
    executor: Executor,
    out: Path,
    store: Path,
    root: Path | None = None,
    *,
    retries: int = 2,
    on_done: OnDone = lambda job, result, n_left: None,
) -> Mapping[str, BaseException]:
    """Run all cells of an experiment that have no results yet, as jobs of an executor.

    Args:
        cells: runs of one experiment.
        executor: executor of the jobs.
        out: folder of all experiments.
        store: directory of a :class:`RunStore`.
        root: data root.
        retries: how often a job is restarted after its worker was lost.
        on_done: called with each job that ends, its result or error, and the number of jobs left.

    Returns:
        Name of each failed job → its error.

    Raises:
        ValueError, TypeError: a name in the settings is unknown.
    """
    check_names(cells)
    return run_jobs(jobs_of(cells, out, store, root), executor, retries=retries, on_done=on_done)


def plan_sweep(cells: Sequence[Cell], store: RunStore, root: Path | None = None) -> RunPlan:
    """Return the plan of a sweep without running it: number of trainings, number already stored, estimated time."""
    n_main, paths = 0, list[list[str]]()
    for cell in cells:
        benchmark, make = build(cell, root)
        n_main += len(benchmark.train_stream)
        paths += reference_paths(make, benchmark, store, ("full", "same", *cell.experiment.floors))
    return plan_paths(paths, store, n_main)
