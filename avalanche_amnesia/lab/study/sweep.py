"""Sweeps: all runs of an experiment as jobs that wait for the references which they share, and the plan of them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from avalanche_amnesia.evaluation.references import Expected, References
from avalanche_amnesia.lab.executors import Executor, Job, JobDone, run_jobs
from avalanche_amnesia.lab.runs.run_plan import PlannedRuns, RunPlan, plan_paths
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.lab.study.building import build
from avalanche_amnesia.lab.study.grid import folder_of, is_done
from avalanche_amnesia.lab.study.running import run_cell, train_references
from avalanche_amnesia.lab.study.settings import Cell


def jobs_of(cells: Sequence[Cell], out: Path, store: Path, root: Path | None = None) -> list[Job]:
    """Jobs of the runs that are not done yet.

    The references of a method and seed are trained by jobs of their own, for all request scenarios together; a run
    waits for those of its own.
    """
    out, store, root = out.absolute(), store.absolute(), None if root is None else root.absolute()
    jobs: list[Job] = []
    missing = [cell for cell in cells if not is_done(cell, folder_of(cell, out))]
    for (method, seed), group in groupby(sorted(missing, key=_of), key=_of):
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
    on_done: Callable[[JobDone], None] = lambda done: None,
) -> Mapping[str, BaseException]:
    """Run what is not done yet.

    Args:
        cells: of one experiment.
        executor: where jobs run.
        out: folder of all experiments.
        store: directory of a :class:`RunStore`.
        root: data root.
        retries: how often a job is begun again whose worker was lost.
        on_done: called after every job.

    Returns:
        Job → the error that ended it.
    """
    return run_jobs(jobs_of(cells, out, store, root), executor, retries=retries, on_done=on_done)


def plan_sweep(cells: Sequence[Cell], store: RunStore, root: Path | None = None) -> RunPlan:
    """Work out what the runs of an experiment would train."""
    n_main = 0
    paths: dict[str, list[list[str]]] = {"full runs": [], "references": [], "floors": []}
    group = {"full": "full runs", "same": "references", "order": "floors", "seed": "floors"}
    for cell in cells:
        benchmark, make = build(cell, root)
        n_main += len(benchmark.train_stream)
        kinds: tuple[Expected, ...] = ("full", "same", *cell.experiment.floors)
        for kind in kinds:
            references = References(make, benchmark)
            references.expect(kind)
            run = None
            for variant, tasks in references.expected():
                run = run or store.run(references.fresh_strategy(variant))
                paths[group[kind]].append(run.keys_of([references.train_experience(task) for task in tasks]))
    return plan_paths(paths, store, [PlannedRuns("main runs", n_main, 0, 0)])


def _of(cell: Cell) -> tuple[str, int]:
    return cell.method, cell.seed
