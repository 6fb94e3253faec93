"""Commands on experiments: ``amnesia run`` and ``amnesia sweep``."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from avalanche_amnesia.lab.runs.parser import Commands, Parser
from avalanche_amnesia.lab.study.settings import Experiment

USES_EXPERIMENT = ("run", "sweep", "plan")
"""Commands whose words may name an experiment's file and settings."""


def add_study_commands(commands: Commands) -> None:
    """Add the commands to the program's."""
    run = commands.add("run", _run, "one method on one stream with one request scenario: amnesia run FILE key=value …")
    _add_experiment(run, "run")
    run.add_argument("--method", type=str, default=None, help="name of a method; the file's first")
    run.add_argument("--scenario", type=str, default=None, help="name of a request scenario; the file's first")
    run.add_argument("--seed", type=int, default=None, help="the file's first")
    _add_places(run)
    run.add_argument("--download", action="store_true", help="let torchvision fetch data that is missing")
    sweep = commands.add("sweep", _sweep, "all runs of an experiment that are not done: amnesia sweep FILE key=value …")
    _add_experiment(sweep, "sweep")
    sweep.add_argument("--method", type=list[str] | str, default=[], help="these methods alone: EWC, or [EWC,LwF]")
    sweep.add_argument("--scenario", type=list[str] | str, default=[], help="these scenarios alone")
    sweep.add_argument("--seed", type=list[int] | int, default=[], help="these seeds in place of the file's")
    _add_places(sweep)
    sweep.add_argument("--plan", action="store_true", help="say what would be trained, and run nothing")
    sweep.add_argument("--executor", choices=("process", "ray", "slurm"), default="process", help="where jobs run")
    sweep.add_argument("--workers", type=int, default=None, help="jobs at a time (process: cores; slurm: 64)")
    sweep.add_argument("--gpus", type=float, default=0.0, help="GPUs of a job; .25: four jobs share one")
    sweep.add_argument("--retries", type=int, default=2, help="how often a job whose worker was lost is begun again")
    sweep.add_argument("--address", type=str, default=None, help="of a Ray cluster: auto, ray://HOST:10001")
    sweep.add_argument("--slurm", type=dict[str, Any], default={}, help='submitit parameters: {"timeout_min": 120}')


def _add_experiment(parser: Parser, command: str) -> None:
    """Give a command the settings of an experiment, and its file."""
    parser.usage = f"amnesia {command} FILE [key=value ...] [--profile small] [options]"
    parser.add_argument("--config", action="config", help="the experiment's YAML file: FILE alone will do")
    parser.add_argument("--profile", type=str, default=None, help="a profile of the file: small, full")
    parser.add_class_arguments(Experiment, None)


def experiment_of(options: Namespace) -> Experiment:
    """The experiment of a command's options."""
    return Experiment(**{field.name: options[field.name] for field in fields(Experiment)})


def _add_places(parser: Parser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for results (%(default)s)")
    parser.add_argument("--store", type=Path, default=Path("runs/store"), help="of references (%(default)s)")
    parser.add_argument("--data-root", type=Path, default=None, help="folder with data sets, or AMNESIA_DATA")


def _run(options: Namespace) -> int:
    from avalanche_amnesia.lab.study.grid import cells_of, folder_of, is_done
    from avalanche_amnesia.lab.study.running import run_cell

    experiment = experiment_of(options)
    given = ([] if name is None else [name] for name in (options.method, options.scenario, options.seed))
    cell = cells_of(experiment, *given)[0]
    folder = folder_of(cell, options.out)
    if is_done(cell, folder):
        sys.stdout.write(f"there already, with these settings: {folder}\n")
        return 0
    run = run_cell(cell, folder, options.store, options.data_root, options.download, print_line)
    print_line(f"{describe(run.last)}\n{folder}")
    return 0


def _sweep(options: Namespace) -> int:
    from avalanche_amnesia.lab.runs.store import RunStore
    from avalanche_amnesia.lab.study.grid import cells_of, folder_of, is_done
    from avalanche_amnesia.lab.study.planning import plan_sweep
    from avalanche_amnesia.lab.study.sweep import sweep

    given = (options.method, options.scenario, options.seed)
    cells = cells_of(experiment_of(options), *(name if isinstance(name, list) else [name] for name in given))
    missing = [cell for cell in cells if not is_done(cell, folder_of(cell, options.out))]
    print_line(f"{len(cells)} runs, {len(cells) - len(missing)} done already")
    if options.plan:
        print_line(str(plan_sweep(missing, RunStore(options.store), options.data_root)))
        return 0
    executor = _executor(options)
    try:
        failed = sweep(
            missing, executor, options.out, options.store, options.data_root, retries=options.retries, told=_tell
        )
    finally:
        executor.close()
    return 1 if failed else 0


def _executor(options: Namespace) -> Any:
    from avalanche_amnesia.lab.executors import ProcessExecutor, RayExecutor, SlurmExecutor

    if options.executor == "ray":
        return RayExecutor(options.address, gpus=options.gpus)
    if options.executor == "slurm":
        workers = {} if options.workers is None else {"workers": options.workers}
        return SlurmExecutor(options.out / "slurm", gpus=options.gpus, parameters=options.slurm, **workers)
    return ProcessExecutor(options.workers, options.gpus)


def _tell(done: Any) -> None:
    if done.error is not None:
        result = f"failed: {type(done.error).__name__}: {done.error}"
    elif isinstance(done.result, int):
        result = f"{done.result} trainings"
    else:
        result = describe(done.result.last)
    print_line(f"[{done.n_done}/{done.n_jobs}] {done.job.name}: {result}")


def describe(last: Any) -> str:
    """A run's end, a ``Moment``, in a few words."""
    from avalanche_amnesia.lab.report.measures import COLUMNS

    accuracy, head, ratio = (COLUMNS[key].of(last) for key in ("remaining", "unlearned", "ratio"))
    words = [] if accuracy is None else [f"accuracy {accuracy:.3f}"]
    words += [] if head is None else [f"on unlearned tasks {head:.3f}"]
    words += [] if ratio is None else [f"JSD {ratio:.1f} × its floor"]
    words += [] if last.claim is None else [last.claim]
    return ", ".join(words)


def print_line(text: str) -> None:
    """Write a line to standard output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
