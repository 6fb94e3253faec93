"""Commands on a store of runs: ``amnesia plan`` and ``amnesia prune``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from avalanche_amnesia.lab.runs.factories import named
from avalanche_amnesia.lab.runs.parser import Commands

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def add_store_commands(commands: Commands) -> None:
    """Add the commands to the program's."""
    plan = commands.add("plan", _plan, "what the runs of a stream would train, what a store has, and how long")
    plan.add_argument("store", type=Path, metavar="STORE", help="directory of RunStore(path)")
    plan.add_argument("--factory", required=True, metavar="MODULE:FUNCTION", help="make_strategy of the references")
    plan.add_argument("--benchmark", required=True, metavar="MODULE:NAME", help="the benchmark, or what makes it")
    prune = commands.add("prune", _prune, "delete states of a store, those not used for longest first")
    prune.add_argument("store", type=Path, metavar="STORE", help="directory of RunStore(path)")
    what = prune.add_mutually_exclusive_group(required=True)
    what.add_argument("--keep", type=_size, metavar="SIZE", help="bytes that may stay: 500M, 2G, 0")
    what.add_argument("--task", type=int, nargs="+", metavar="TASK", help="every state that has seen these tasks")


def _size(text: str | int) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", str(text).strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no size: give bytes, or a number with k, M, G or T")
    return int(float(found[1]) * _UNITS[found[2]])


def _opened(path: Path) -> Any:
    from avalanche_amnesia.lab.runs.store import RunStore  # the host takes seconds to import: not for --help

    if not path.is_dir():
        raise ValueError(f"{path} is no store: give the directory of RunStore(path)")
    return RunStore(path)


def _plan(options: Namespace) -> int:
    from avalanche_amnesia.lab.runs.run_plan import plan_runs
    from avalanche_amnesia.lab.runs.store import RunStore

    benchmark = named(options.benchmark, "--benchmark")
    benchmark = benchmark() if callable(benchmark) else benchmark
    sys.stdout.write(f"{plan_runs(named(options.factory, '--factory'), benchmark, RunStore(options.store))}\n")
    return 0


def _prune(options: Namespace) -> int:
    store = _opened(options.store)
    before = len(store.nodes())
    freed = store.prune(keep=options.keep) if options.task is None else store.prune(tasks=options.task)
    left = len(store.nodes())
    sys.stdout.write(f"{before - left} of {before} states deleted, {freed:,} bytes freed, {store.nbytes():,} left\n")
    return 0
