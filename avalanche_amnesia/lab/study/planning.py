"""Plan of a sweep: trainings that its runs and their references would be, and which of them are in the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from avalanche_amnesia.evaluation.references import Expected, References
from avalanche_amnesia.lab.runs.run_plan import PlannedRuns, RunPlan, plan_paths
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.lab.study.building import build
from avalanche_amnesia.lab.study.settings import Cell


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
