"""One run of an experiment, and the references that several runs share: what a worker is asked to do."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import avalanche
import torch

from avalanche_amnesia.evaluation.references import Expected, References
from avalanche_amnesia.lab.report.reading import Run, read_run
from avalanche_amnesia.lab.report.tables import csv_of
from avalanche_amnesia.lab.runs.measuring import measure_run
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.lab.study.building import build
from avalanche_amnesia.lab.study.grid import resolved, write_settings
from avalanche_amnesia.lab.study.settings import Cell
from avalanche_amnesia.saving.files import replace_file


@contextmanager
def _as_worker() -> Iterator[None]:
    """Compute with one thread, which gives the same bits whatever the number of cores, and without the host's noise."""
    torch.set_num_threads(1)
    host = Path(avalanche.__file__).parent
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"avalanche\.")
        show = warnings.showwarning

        # No filter: the host puts one of its own before all others, each time it calls what it deprecates.
        def shown(message: Any, category: type[Warning], filename: str, *where: Any, **more: Any) -> None:
            if not (issubclass(category, DeprecationWarning) and host in Path(filename).parents):
                show(message, category, filename, *where, **more)

        warnings.showwarning = shown
        yield


@_as_worker()
def run_cell(
    cell: Cell,
    folder: Path,
    store: Path | None = None,
    root: str | Path | None = None,
    download: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Run:
    """Run one method on one stream with its requests, measure it after every task, and write the results.

    Args:
        cell: of an experiment.
        folder: for the log (``run.jsonl``), ``results.csv`` and ``settings.yaml``.
        store: directory of a :class:`RunStore`, where references are kept and found; None: a temporary one.
        root: data root.
        download: let torchvision fetch what is missing.
        progress: called with a few words after every task.

    Returns:
        The run as its log tells it.

    Raises:
        TypeError, ValueError, OSError: as :func:`~avalanche_amnesia.lab.study.building.build`.
    """
    benchmark, make = build(cell, root, download)
    kept = None if store is None else RunStore(store)
    stream = cell.experiment.stream
    requests = {e.task_label: [[*r.tasks] for r in e.requests] for e in benchmark.train_stream if e.requests}
    settings = resolved(cell) | {"data": f"{stream.name}, {stream.n_tasks} tasks", "requests": requests}
    floors = cell.experiment.floors
    measure_run(
        cell.method, make, benchmark, folder, settings=settings, noise_floor=floors, progress=progress, store=kept
    )
    run = read_run(folder)
    replace_file(folder / "results.csv", csv_of([run]))
    write_settings(cell, folder)  # last: they say that the results are whole
    return run


@_as_worker()
def train_references(
    cells: Iterable[Cell], kinds: Iterable[Expected], store: Path, root: str | Path | None = None
) -> int:
    """Train what the metrics of some runs will ask for, each state once."""
    kept, n = RunStore(store), 0
    for cell in cells:
        benchmark, make = build(cell, root)
        references = References(make, benchmark, store=kept)
        references.expect(*kinds)
        for variant, path in references.expected():
            references.train_along(path, variant)
        n += references.trainings
    return n
