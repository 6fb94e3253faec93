"""The command line: each command (``amnesia demo``, ``run``, ``sweep`` …) is a function.

Positional parameters are arguments of the command, keyword-only parameters are its options. Types come from the
signature, help texts from the docstring or from :data:`COMMON_HELP`. The parser is the standard library's argparse
because ``--help`` must stay fast: importing jsonargparse takes .3 s and Typer .08 s. Avalanche and torch take seconds
to import, so commands import them only when they run.
"""

import argparse
import inspect
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import loky
import shtab

from avalanche_amnesia import __version__, training
from avalanche_amnesia import audit as records
from avalanche_amnesia.audit.signing import verifier_of
from avalanche_amnesia.audit.words import claim_in_words, data_in_words, outcome_in_words, wrap
from avalanche_amnesia.checks import did_you_mean
from avalanche_amnesia.lab import executors, logging, runs, study
from avalanche_amnesia.lab import report as pages
from avalanche_amnesia.lab.executors import clusters, jobs
from avalanche_amnesia.lab.report.reading import read_runs
from avalanche_amnesia.lab.study import settings
from avalanche_amnesia.lab.study.settings import Experiment, StreamSettings, find_named
from avalanche_amnesia.saving import files as state_files
from avalanche_amnesia.saving.files import read_body, replace_file
from avalanche_amnesia.saving.typed import to_type

Changes = list[tuple[str, str]]
"""Settings to change: pairs of a dotted name and a value as YAML, given as ``key=value``."""
COMMON_HELP = {
    "file": "the experiment's YAML file",
    "profile": "a profile of the file: small, full",
    "method": "only these methods: EWC, or [EWC,LwF]",
    "scenario": "only these scenarios",
    "seed": "these seeds in place of the file's",
    "out": "folder for results",
    "store": "of references",
    "data_root": "folder with data sets, or AMNESIA_DATA",
}
"""Help texts of options that several commands share."""
RUNS, STORE = Path("runs"), Path("runs/store")


def demo(
    *,
    out: Path = RUNS / "demo",
    data_root: str | None = None,
    seed: int = 0,
    epochs: int | None = None,
    store: Path | None = None,
) -> None:
    """Run the demo: four strategies learn digits, unlearn tasks on request, and are compared in a report.

    Args:
        out: folder for the results
        data_root: use MNIST below this folder instead of the embedded digits
        seed: seed of all random draws
        epochs: epochs per task (20 on digits, 2 on MNIST)
        store: keep references in this folder, to continue after an interruption
    """
    _check_writable({"--out": out, "--store": store})
    images = "digits" if data_root is None else "MNIST"
    _print(f"{images}, learned task by task by four methods, and forgotten on request")
    spare_cores = loky.cpu_count() - 1 or 1
    with tempfile.TemporaryDirectory() as place, closing(executors.ProcessExecutor(spare_cores)) as helper:
        helper.submit(import_module, "avalanche_amnesia.lab.study.sweep")  # while this process imports it, too
        from avalanche_amnesia.lab.study.demo import run_demo

        run_demo(out, _print, helper, store or Path(place), data_root=data_root, seed=seed, epochs=epochs)


def run(
    file: Path | None = None,
    *,
    changes: Changes,
    profile: str | None = None,
    method: str | None = None,
    scenario: str | None = None,
    stream: str | None = None,
    network: str | None = None,
    seed: int | None = None,
    out: Path = RUNS,
    store: Path = STORE,
    data_root: Path | None = None,
) -> None:
    """Run one method on one stream in one unlearning scenario: amnesia run FILE key=value …, or --method without FILE.

    Args:
        file: the experiment's YAML file; without it, use the method and scenario names of amnesia list
        method: name of a method in the file (default: its first), or MODULE:NAME of your own
        scenario: name of a request scenario in the file (default: its first)
        stream: stream to use instead of the file's
        network: network to use instead of the file's
        seed: seed (default: the file's first)
    """
    from avalanche_amnesia.lab.study.experiment import differences, experiment_of, folder_of, is_done, read_experiment

    given = {"stream.name": stream, "network.name": network}
    changes = [*((key, name) for key, name in given.items() if name is not None), *changes]
    if file is not None:
        experiment = read_experiment(file, profile, changes)
        methods, scenarios = ([] if name is None else [name] for name in (method, scenario))
    elif method is None or profile is not None:
        raise ValueError("run needs an experiment's file, or --method without --profile: amnesia list names methods")
    else:
        content: dict[str, Any] = {"methods": {_row_name(method): {"kind": method}}}
        if scenario is not None:
            content["scenarios"] = {_row_name(scenario): {"name": scenario}}
        experiment = experiment_of({"name": _row_name(stream or StreamSettings.name), **content}, changes)
        methods, scenarios = [], []
    cell = study.cells_of(experiment, methods, scenarios, [] if seed is None else [seed])[0]
    folder = folder_of(cell, out)
    _check_writable({"--out": folder, "--store": store})
    if is_done(cell, folder):
        _print(f"there already, with these settings: {folder}")
        return
    _check_data(cell, data_root)
    if differs := differences(cell, folder):
        _print(f"replaces the run in {folder}, which has other settings or files: {', '.join(differs)}")
    _print(f"{cell.method} under {cell.scenario}, seed {cell.seed}: {cell.experiment.stream.n_tasks} tasks")
    from avalanche_amnesia.lab.study.sweep import run_cell

    _print(f"{_run_summary(run_cell(cell, folder, store, data_root, _print))}\n{folder}")


def sweep(
    file: Path,
    *,
    changes: Changes,
    profile: str | None = None,
    method: str = "[]",
    scenario: str = "[]",
    seed: str = "[]",
    out: Path = RUNS,
    store: Path = STORE,
    data_root: Path | None = None,
    executor: Literal["process", "ray", "slurm"] = "process",
    workers: int | None = None,
    gpus: float = 0.0,
    retries: int = 2,
    address: str | None = None,
    slurm: str = "{}",
) -> int:
    """Run all runs of an experiment (method, scenario, seed) that have no results yet: amnesia sweep FILE key=value …

    Args:
        executor: system that runs the jobs
        workers: number of jobs at a time (default: all cores; slurm: 64)
        gpus: GPUs of a job; .25: four jobs share one
        retries: number of times to restart a job after its worker was lost
        address: address of a Ray cluster: auto, ray://HOST:10001
        slurm: submitit parameters: {"timeout_min": 120}
    """
    from avalanche_amnesia.lab.study.experiment import from_yaml, read_experiment

    parameters = to_type(dict[str, Any], from_yaml(slurm, "--slurm"), "--slurm")
    missing = _missing_runs(read_experiment(file, profile, changes), method, scenario, seed, out, store)
    if not missing:
        return 0
    if executor == "process":  # a cluster's workers may have other data
        _check_data(missing[0], data_root)
    from avalanche_amnesia.lab.study.building import build, check_names, make_network

    check_names(missing)  # before using the cluster

    where: jobs.Executor
    if executor == "ray":
        where = clusters.RayExecutor(address, gpus=gpus)
    elif executor == "slurm":
        where = clusters.SlurmExecutor(out / "slurm", workers=workers or 64, gpus=gpus, parameters=parameters)
    else:
        first = build(missing[0], data_root)[0].train_stream[0]  # a fault here is one of all runs
        make_network(missing[0].experiment.network, first.dataset[0][0])
        where = executors.ProcessExecutor(workers, gpus)
    with closing(where):
        failed = study.sweep(missing, where, out, store, data_root, retries=retries, on_done=_progress_printer())
    return 1 if failed else 0


def report(folders: list[Path], *, out: Path | None = None, tables: Path | None = None) -> None:
    """Write a page about logged runs: unlearned tasks, traces of them in the models, costs; or write tables.

    Args:
        folders: folders with runs (run.jsonl) at any depth; runs that differ only in the seed are shown as one
        out: file for the page (default: report.html)
        tables: write CSV, Markdown, figures and JSON per seed to this folder instead of a page; FOLDERS must then be
            results of amnesia run or sweep
    """
    if None not in (out, tables):
        raise ValueError("report writes either a page (--out) or tables (--tables): give one of them, then the other")
    page_file = out or Path("report.html")
    _check_writable({"--tables": tables}, {"--out": page_file} if tables is None else {})
    if tables is not None:
        from avalanche_amnesia.lab.study.tables import read_study, write_tables

        for file in write_tables([run for folder in folders for run in read_study(folder)], tables):
            _print(f"{file}: {file.stat().st_size:,} bytes")
        return
    shown = [run for folder in folders for run in read_runs(folder)]
    from avalanche_amnesia.lab.report.page import report_page

    page = report_page(shown).encode(errors="replace")
    page_file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page_file, page)
    from avalanche_amnesia.lab.report.verdicts import verdicts_as_text

    _print(verdicts_as_text(pages.entries(shown)))
    _print(f"{page_file}: {len(page):,} bytes, {len(shown)} run(s)")


def unlearn(
    state: Path,
    *,
    tasks: list[int] | None = None,
    task: int | None = None,
    samples: list[int] | None = None,
    classes: list[int] | None = None,
    factory: str,
    benchmark: str | None = None,
    record: Path,
    out: Path | None = None,
    sign: Path | None = None,
    public_key: Path | None = None,
) -> None:
    """Unlearn tasks of a saved state, or samples or classes of one task.

    Args:
        state: directory made by strategy.save(path)
        tasks: labels of tasks to unlearn, from 0
        task: task to train again without --samples and --classes (instead of --tasks)
        samples: positions in the task's training data, from 0
        classes: class labels in the task's training data
        factory: MODULE:FUNCTION without arguments; returns an untrained strategy with the saved one's arguments
        benchmark: MODULE:NAME of the benchmark with --task's data (unless features are kept), or of a function for it
        record: new JSON file for the record; the same request again, as after a kill, writes its record
        out: directory for the new state (default: replace STATE)
        sign: PEM file of the private key to sign the record and the new state with
        public_key: PEM file of the state signer's public key, to verify the state
    """
    if (tasks is None) == (task is None) or (task is None) != (samples is None and classes is None):
        raise ValueError("unlearn needs one of --tasks TASK … and --task TASK with --samples, --classes or both")
    if benchmark is not None and task is None:
        raise ValueError(f"--benchmark {benchmark} is for --task, whose data it has; --tasks needs none")
    into = state if out is None else out
    _check_writable({"--out": out}, {"--record": record})
    strategy, unlearning, key, before = _load_strategy(state, into, factory, sign, public_key)
    data = None
    if benchmark is not None:
        stream = _load_benchmark(benchmark).train_stream
        if (data := next((each for each in stream if list(each.task_labels) == [task]), None)) is None:
            raise ValueError(f"--benchmark {benchmark} has no task {task} in its train stream")
    if record.exists() or record.absolute().parent == into.absolute():
        raise ValueError(f"--record {record} exists, or belongs to the state: name a new file outside of {into}")
    parts = {"task": task, "samples": samples or (), "classes": classes or ()}
    last = unlearning.records[-1].plan.tasks if unlearning.records else ()
    if tasks and sorted(tasks) == sorted(last) and not {*tasks} & {*unlearning.ledger.remaining}:
        done = unlearning.records[-1]  # a command that was killed left no record
    else:
        done = unlearning.unlearn(strategy, tasks or (), data=data, **parts)
    _save_with_record(strategy, into, done, record, key, before)
    _print_summary(outcome_in_words(done, into, state), f"{done}\n\nstate: {into}\nrecord: {record}")


def prove(
    state: Path,
    *,
    factory: str,
    benchmark: str,
    tasks: list[int] | None = None,
    record: Path | None = None,
    store: Path | None = None,
    sign: Path | None = None,
    public_key: Path | None = None,
) -> int:
    """Prove the last unlearning of a saved state: retrain the tasks that were not unlearned, and compare all tensors.

    Args:
        state: directory made by strategy.save(path); the outcome is saved there, too
        factory: MODULE:FUNCTION without arguments; returns an untrained strategy with the saved one's arguments
        benchmark: MODULE:NAME of the run's benchmark, or of a function that returns it
        tasks: only these remaining tasks, if each has its own weights (default: all)
        record: JSON file for the record with its proof
        store: keep trained tasks in this folder, to continue after an interruption
        sign: PEM file of the private key to sign the record and the state with
        public_key: PEM file of the state signer's public key, to verify the state
    """
    _check_writable({"--store": store}, {} if record is None else {"--record": record})
    strategy, unlearning, key, before = _load_strategy(state, state, factory, sign, public_key)

    def make(evaluator: Any) -> Any:
        made = _call_factory(factory, "--factory")
        made.plugins = [evaluator if plugin is made.evaluator else plugin for plugin in made.plugins]
        made.evaluator = evaluator
        return made

    from avalanche_amnesia.evaluation import References

    kept = None if store is None else runs.RunStore(store)
    options = unlearning.claims.train_options()
    references = References(make, _load_benchmark(benchmark), train_options=options, store=kept)
    failure = ""
    try:
        done = unlearning.prove(strategy, references, tasks=tasks or ())
    except records.ProofError as error:
        failure, done = str(error), error.record
    _save_with_record(strategy, state, done, record, key, before)
    _print_summary([failure or f"{data_in_words(done.plan)}: {claim_in_words(done)}."], str(done))
    return 1 if failure else 0


def verify(record: Path, *, public_key: Path | None = None, state: Path | None = None, json_: bool = False) -> int:
    """Verify the signature of an unlearning's record, and compare a saved state with the record.

    Args:
        record: JSON file of the unlearning, signed or not
        public_key: PEM file of the public key of the record's signer, and of the state's
        state: saved state to compare with the record
        json_: print one JSON object, for programs
    """
    read = _read_record(record, public_key)
    unchecked = "read; its signature was not checked (--public-key)"
    told = [f"record: {unchecked if public_key is None else 'signed by the holder of this key, and unchanged'}"]
    differ = None if state is None else _differing_parts(read, state, public_key)
    if differ:
        some = ", ".join(differ[:5]) + (", …" if len(differ) > 5 else "")
        told.append(f"state: not, or no longer, as this unlearning left it; {len(differ)} parts differ: {some}")
    elif differ is not None:
        told.append(f"state: all {len(read.after)} tensors, updates and records are as the unlearning left them")
    signed = None if public_key is None else True  # a wrong signature raises an error
    found = {"told": told, "signed": signed, "state_as_left": None if differ is None else not differ, "differ": differ}
    _print(json.dumps(found) if json_ else "\n".join(told))
    return 1 if differ else 0


def _differing_parts(record: Any, state: Path, public_key: Path | None) -> list[str]:
    """Return the tensors and other parts of a saved state that differ from an unlearning's record, by name."""
    read_body(state)  # report a path without a state before importing torch
    from avalanche_amnesia.bits import state_hashes
    from avalanche_amnesia.saving.encoding import decode

    check = None if public_key is None else verifier_of(public_key.read_bytes())
    held = decode(*state_files.read_state(state, check=check))
    tensors = {name: tensor for part in held["model"]["tensors"] for name, tensor in part.items()}
    here, left = state_hashes(tensors), record.after
    differ = sorted(name for name in here.keys() | left if here.get(name) != left.get(name))
    for _, plugin in held["plugins"]:
        match plugin:
            case {"trajectory": {"logs": updates}}:
                differ += [f"the update of task {task}" for task in record.plan.tasks if task in updates]
            case {"records": kept}:
                last = records.UnlearningRecord.from_json(json.dumps(kept[-1])) if kept else None
                if last is None or replace(last, proof=record.proof and last.proof) != record:
                    differ.append("its last record")
    return differ


def plan(
    file: Path,
    *,
    changes: Changes,
    profile: str | None = None,
    method: str = "[]",
    scenario: str = "[]",
    seed: str = "[]",
    out: Path = RUNS,
    store: Path = STORE,
    data_root: Path | None = None,
) -> None:
    """Print the plan of a sweep without running it: trainings, stored results, and estimated time."""
    from avalanche_amnesia.lab.study.experiment import read_experiment

    missing = _missing_runs(read_experiment(file, profile, changes), method, scenario, seed, out, store)
    if missing:
        _check_data(missing[0], data_root)
    from avalanche_amnesia.lab.study.sweep import plan_sweep

    _print(str(plan_sweep(missing, runs.RunStore(store), data_root)))


def prune(store: Path, *, keep: str | None = None, task: list[int] | None = None) -> None:
    """Delete states (saved strategies) from a store: those least recently used, or those trained on given tasks.

    Args:
        store: directory of RunStore(path)
        keep: number of bytes to keep, such as 500M, 2G or 0
        task: delete every state trained on these tasks (instead of --keep)
    """
    if (keep is None) == (task is None):
        raise ValueError("prune needs one of --keep SIZE and --task TASK …")
    if (size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", (keep or "0").strip().lower())) is None:
        raise ValueError(f"--keep {keep!r} is no size: give bytes, or a number with k, M, G or T")
    if not store.is_dir():
        raise ValueError(f"{store} is no store: give the directory of RunStore(path)")
    kept = runs.RunStore(store)
    before = len(kept.nodes())
    n_bytes = int(float(size[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}[size[2]])
    freed = kept.prune(None if keep is None else n_bytes, tasks=task or ())
    _print(f"{before - len(kept.nodes())} of {before} states deleted, {freed:,} bytes freed, {kept.nbytes():,} left")


def sync(folders: list[Path], *, project: str | None = None, mode: Literal["online", "offline"] | None = None) -> int:
    """Send runs logged as JSON lines to W&B.

    Args:
        folders: folders that contain runs at any depth
        project: W&B project for all runs (default: the project named in each run)
        mode: online, or offline: write offline runs of W&B (default: WANDB_MODE, else online if a key is configured)
    """
    outcomes = logging.sync(folders, project=project, mode=mode)
    for outcome in outcomes:
        _print(str(outcome))
    return 1 if any(outcome.result == "failed" for outcome in outcomes) else 0


def list_() -> None:
    """List methods, streams, networks, unlearning scenarios and metrics, one line each."""
    from avalanche_amnesia.lab.report.measures import MEANINGS, MEASURES, TRACE_TESTS

    measured = {MEASURES[key].title: meaning for key, meaning in MEANINGS.items()}
    metrics = measured | {reading.check: reading.title for reading in TRACE_TESTS if reading.check not in measured}
    kinds = {kind: getattr(settings, kind.upper()) for kind in ("methods", "streams", "networks", "scenarios")}
    kinds["metrics"] = metrics
    for kind, names in kinds.items():
        _print(kind + ("" if kind == "metrics" else ", or MODULE:NAME of your own"))
        width = max(map(len, names))
        for name, line in names.items():
            _print(f"  {name:{width}}  {line}")


def data(*, data_root: Path | None = None, download: list[str] | None = None) -> None:
    """List data sets and their folders, or download data sets.

    Args:
        download: names of data sets to download with torchvision
    """
    of_torchvision = settings.DATA_SETS.keys() - {"digits", "CIFAR10-JPEG"}
    to_type(list[Literal[tuple(sorted(of_torchvision))]], download or [], "--download")  # type: ignore[misc]
    given = data_root or os.environ.get("AMNESIA_DATA")
    root = Path(given) if given else None
    if root or download:  # else no torch is needed, whose import takes seconds
        from torchvision import datasets

        from avalanche_amnesia.contrib.streams import image_sets
    for name in download or ():
        folder = image_sets.data_root("amnesia data --download", root, "data sets")
        folder.mkdir(parents=True, exist_ok=True)
        getattr(datasets, name)(str(folder), download=True)
    _print("no data root: give --data-root, or set AMNESIA_DATA" if root is None else str(root))
    for name, content in settings.DATA_SETS.items():
        is_there = name == "digits" or (root is not None and not image_sets.absent_files(name, root))
        state = "there" if is_there else "--download" if name in of_torchvision else "missing"
        _print(f"{name:15}{state:11}{content}")


COMMANDS: Any = (demo, list_, run, sweep, plan, report, unlearn, prove, verify, prune, sync, data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (default: ``sys.argv``), and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("WANDB_SILENT", "true")
    options: dict[str, Any] = {}
    try:
        options = _parse(words)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"avalanche\.")
        return options.pop("function")(**options) or 0
    except Exception as error:
        is_ours = type(error).__module__.startswith("avalanche_amnesia.")
        if not is_ours and not isinstance(error, (OSError, ValueError, TypeError, ImportError)):
            raise  # show the traceback for errors of the user's code or of libraries
        sys.stderr.write(f"amnesia: {error}\n")
        return 2
    except KeyboardInterrupt:
        kept = options.get("store")
        goes_on = "starts again" if kept is None else f"goes on with the references in {kept}"
        sys.stderr.write(f"amnesia: interrupted, no file is half written; the same command {goes_on}\n")
        return 130


# The parser ---------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Parser that raises ValueError with a one-line message for :func:`main` to print."""

    def error(self, message: str) -> NoReturn:
        lacks = message.removeprefix("the following arguments are required: ")
        raise ValueError(message if lacks == message else f"{self.prog} needs {lacks}; {self.prog} --help explains")


def _parse(words: list[str]) -> dict[str, Any]:
    """Parse the words of a command into a dict of arguments, with the command's function under ``function``."""
    parser = _Parser(prog="amnesia", description="Continual learning that can forget on request.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    shtab.add_argument_to(parser, "--print_completion", help="print a script that completes commands in a shell")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for function in COMMANDS:
        _add(commands, function)
    if words and not words[0].startswith("-") and words[0] not in commands.choices:
        near = did_you_mean(words[0], commands.choices) or f"; there are {', '.join(commands.choices)}"
        raise ValueError(f"there is no command {words[0]!r}{near}")
    names = set(commands.choices[words[0]]._option_string_actions) if words and words[0] in commands.choices else set()
    if "--set" in names:
        words = [_as_option(word, names) for word in words]
    options, unknown = parser.parse_known_args(words)
    if unknown:
        near = did_you_mean(f"--{unknown[0].lstrip('-').partition('=')[0]}", names)
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{near}")
    del options.print_completion
    return vars(options)


def _as_option(word: str, names: set[str]) -> str:
    """Rewrite ``key=value`` as the command's option ``--key=value``, or as ``--set=key=value`` if it has none."""
    name, equals, _ = word.partition("=")
    if not equals and re.match(r"(stream|network|training|methods|scenarios)\.", word) and not os.path.exists(word):
        raise ValueError(f"{word} lacks its value: say {word}=VALUE")
    if not equals or word.startswith("-"):
        return word
    return f"--{word}" if f"--{name}" in names else f"--set={word}"


def _add(commands: Any, function: Callable[..., int | None]) -> None:
    """Add a subcommand to the parser, with the parameters of a function as the subcommand's options."""
    summary, own = _docstring_parts(function)
    texts = COMMON_HELP | own
    command = function.__name__.rstrip("_").replace("_", "-")
    parser = commands.add_parser(command, help=summary, description=summary, allow_abbrev=False)
    parser.set_defaults(function=function)
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.annotation == Changes:
            _add_settings(parser, command)
            continue
        kind, default = parameter.annotation, parameter.default
        kind = get_args(kind)[0] if get_origin(kind) in (Union, UnionType) else kind
        shown = "" if default in (parameter.empty, None, False) else f" (default: {default})"
        options: dict[str, Any] = {"help": f"{texts[name]}{shown}"}
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is list:
            options |= {"type": get_args(kind)[0], "nargs": "+"}
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["type"] = kind
        if parameter.kind is parameter.KEYWORD_ONLY:
            options |= {"required": True} if default is parameter.empty else {"default": default}
            parser.add_argument(f"--{name.rstrip('_').replace('_', '-')}", dest=name, **options)
        else:
            parser.add_argument(name, **options if default is parameter.empty else {**options, "nargs": "?"})


def _add_settings(parser: argparse.ArgumentParser, command: str) -> None:
    """Add an option for each setting of an experiment to the parser of a command."""
    parser.usage = f"amnesia {command} FILE [key=value ...] [--profile small] [options]"
    group = parser.add_argument_group("settings of the experiment, with or without the dashes")
    change: dict[str, Any] = {"action": "append", "dest": "changes", "default": []}
    group.add_argument("--set", metavar="KEY=VALUE", help="any", type=lambda word: word.partition("=")[::2], **change)
    for name, text in _settings(Experiment):
        kind = partial(lambda name, value: (name, value), name)
        group.add_argument(f"--{name}", metavar="VALUE", help=text.replace("%", "%%"), type=kind, **change)


def _settings(kind: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, help text) for each setting of a dataclass and of the dataclasses in its fields."""
    (_, texts), hints = _docstring_parts(kind), get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        name, hint = f"{before}{field.name}", hints[field.name]
        if inner := [part for part in (hint, *get_args(hint)) if is_dataclass(part)]:
            yield from _settings(inner[0], f"{name}." if inner[0] is hint else f"{name}.NAME.")
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = "" if default is MISSING else f", default: {default}"
        what = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        if get_origin(hint) is Annotated:
            of, allowed = get_args(hint)
            what = f"int, at least {allowed}" if of is int else f"{', '.join(allowed)}, or MODULE:NAME"
        yield name, f"{texts[field.name]} (type: {what}{shown})"


def _docstring_parts(obj: Any) -> tuple[str, dict[str, str]]:
    """Return a docstring's first line, and a dict of name to text for the arguments or attributes it lists."""
    text = inspect.getdoc(obj) or ""
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, flags=re.MULTILINE)
    return text.partition("\n")[0], {name: " ".join(words.split()) for name, words in entries}


def _check_writable(folders: dict[str, Path | None], files: dict[str, Path] | None = None) -> None:
    """Raise ValueError if an option names a folder or file that cannot be written."""
    for option, file in (files or {}).items():
        if file.is_dir():
            raise ValueError(f"{option} {file} is a folder: name a file")
        folders = {**folders, option: file.parent}
    for option, folder in folders.items():
        if folder is None:
            continue
        there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
        if not there.is_dir():
            raise ValueError(f"{option} {folder}: {there} is a file; name a folder")
        try:
            tempfile.TemporaryFile(dir=there).close()  # permissions alone may mislead
        except OSError as error:
            raise ValueError(f"{option} {folder}: nothing can be written there ({error}); name another") from error


def _row_name(name: str) -> str:
    """Return the name of a method or scenario in tables: the part after the colon of ``MODULE:NAME``."""
    return name.rpartition(":")[2]


def _load_benchmark(name: str) -> Any:
    """Return the benchmark named ``module:name``; call the object first if it is a function."""
    found = find_named(name, "--benchmark")
    found = _call_factory(name, "--benchmark") if callable(found) else found
    if not hasattr(found, "train_stream"):
        raise ValueError(f"--benchmark {name} is {found!r}, no benchmark")
    return found


def _missing_runs(experiment: Any, method: str, scenario: str, seed: str, out: Path, store: Path) -> list[Any]:
    """Return the runs of an experiment that have no results yet, and print how many are done."""
    from avalanche_amnesia.lab.study.experiment import folder_of, from_yaml, is_done

    def parse_list(kind: Any, text: str, option: str) -> Any:
        value = from_yaml(text, option)  # EWC, or [EWC,LwF]
        return to_type(kind, value if isinstance(value, list) else [value], option)

    methods, scenarios = parse_list(list[str], method, "method"), parse_list(list[str], scenario, "scenario")
    cells = study.cells_of(experiment, methods, scenarios, parse_list(list[int], seed, "seed"))
    _check_writable({"--out": out, "--store": store})
    missing = [cell for cell in cells if not is_done(cell, folder_of(cell, out))]
    beside = "; their references come first" if missing else ""
    _print(f"{experiment.name}: {len(cells)} runs, {len(cells) - len(missing)} done already{beside}")
    return missing


def _check_data(cell: Any, data_root: Path | None) -> None:
    """Raise ValueError if a built-in stream needs a data root and none is given; torch need not be imported for it."""
    name, options = cell.experiment.stream.name, cell.experiment.stream.options
    needed = max((each for each in settings.DATA_SETS if name.endswith(each)), key=len, default=None)
    if needed and ":" not in name and not (data_root or os.environ.get("AMNESIA_DATA") or "root" in options):
        fill = f"amnesia data --data-root FOLDER --download {needed} fills it"
        raise ValueError(f"{name} needs a data root: --data-root FOLDER, or AMNESIA_DATA; {fill}")


def _save_with_record(strategy: Any, into: Path, done: Any, record: Path | None, key: bytes | None, old: Any) -> None:
    """Save a strategy and, if ``record`` names a file, the unlearning record: both or neither; ``old``: state there."""
    with state_files.lock_directory(into.absolute().parent, to_write=True):
        if old is not None and read_body(into) != old:
            raise ValueError(f"another program has changed {into} since it was read: nothing was saved, do it again")
        if record is None:
            training.save_state(strategy, into, key)
            return
        record.parent.mkdir(parents=True, exist_ok=True)
        with state_files.replace_files([record]) as (part,):
            part.write_text((done.to_json() if key is None else done.sign(key)) + "\n")
            training.save_state(strategy, into, key)


def _load_strategy(state: Path, into: Path, factory: str, sign: Path | None, by: Path | None) -> tuple[Any, ...]:
    """Load a saved state; return (strategy, its unlearning plugin, private key, JSON of a state to be replaced)."""
    key, public = _read_key(sign, "--sign"), _read_key(by, "--public-key")
    before = read_body(state)  # report a path without a state first
    state_files.refuse_other_files(into)
    if key is None and into == state and "signature" in json.loads((state / state_files.STATE).read_text()):
        raise ValueError(f"{state} is signed, and would not be any more: give --sign KEY.pem")
    strategy = _call_factory(factory, "--factory")
    if read_body(state) != before:
        raise ValueError(f"importing {factory} changed {state}: put what it trains under if __name__ == '__main__'")
    if not hasattr(strategy, "plugins"):
        raise ValueError(f"--factory {factory} returned {strategy!r}, no strategy")
    training.load_state(strategy, state, public)
    from avalanche_amnesia.training.host.lookup import find_plugin

    if (unlearning := find_plugin(strategy, training.UnlearningPlugin)) is None:
        raise ValueError(f"{factory} builds a {type(strategy).__name__}, which does not unlearn")
    return strategy, unlearning, key, before if into == state else None


def _read_record(file: Path, public_key: Path | None) -> Any:
    """Read an unlearning's record from a JSON file, and verify its signature if a public key is given."""
    if not file.is_file():
        found = f"{file} is a folder" if file.is_dir() else f"there is no file {file}"
        raise ValueError(f"{found}: give the JSON file of an unlearning's record")
    key = _read_key(public_key, "--public-key")
    try:
        text = file.read_text()
        return records.UnlearningRecord.from_json(text) if key is None else records.verify(text, key)
    except ValueError as error:
        raise ValueError(f"{file}: {'it is no text' if isinstance(error, UnicodeDecodeError) else error}") from error


def _read_key(file: Path | None, option: str) -> bytes | None:
    """Return the content of a key file, or None if no file is given."""
    if file is not None and not file.is_file():
        raise ValueError(f"{option} {file}: there is no such file; give a PEM file with a key")
    return None if file is None else file.read_bytes()


def _call_factory(name: str, option: str) -> Any:
    """Call the function ``module:name`` without arguments; raise its errors again with this name in the message."""
    make = find_named(name, option)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(f"{option} {name} must be a function without arguments: {error}") from None
    try:
        return make()
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ValueError(f"{option} {name} raised {type(error).__name__}: {error}") from error


def _progress_printer() -> Callable[[Any, Any, int], None]:
    """Return a callback that prints a line for each finished job: its number, name and result."""
    n_done = count(1)

    def print_job(job: Any, result: Any, n_left: int) -> None:
        if isinstance(result, BaseException):
            words = f"failed: {type(result).__name__}: {result}"
        else:
            words = f"{result} trainings" if isinstance(result, int) else _run_summary(result)
        n = next(n_done)
        _print(f"[{n}/{n + n_left}] {job.name}: {words}")

    return print_job


def _run_summary(run: Any) -> str:
    """Return a run's final metrics, and the verdict on traces of unlearned tasks, as text."""
    from avalanche_amnesia.lab.report.measures import COLUMNS
    from avalanche_amnesia.lab.report.verdicts import verdict_of

    shown = [(COLUMNS[key], COLUMNS[key].get(run.last)) for key in ("remaining", "unlearned", "ratio")]
    words = [f"{column.page} {column.words(value)}" for column, value in shown if value is not None]
    return ", ".join([*words, str(verdict_of([run]))])


def _print_summary(told: Sequence[str], details: str) -> None:
    """Print sentences, wrapped to short lines, and details after them."""
    _print("\n".join([*(line for sentence in told for line in wrap(sentence)), "", details]))


def _print(text: str) -> None:
    """Write a line to standard output and flush it."""
    coding = sys.stdout.encoding or "utf-8"  # a terminal may lack characters
    sys.stdout.write(f"{text}\n".encode(coding, "replace").decode(coding))
    sys.stdout.flush()
