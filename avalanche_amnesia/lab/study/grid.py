"""Runs of an experiment: which there are, where their results lie, and which of them are done."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from avalanche_amnesia.checks import did_you_mean
from avalanche_amnesia.lab.logging.json_lines import RUN_FILE
from avalanche_amnesia.lab.study.settings import OBEY_NOTHING, Cell, Experiment
from avalanche_amnesia.saving.files import replace_file

SETTINGS = "settings.yaml"


def cells_of(
    experiment: Experiment, methods: Sequence[str] = (), scenarios: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Cell]:
    """Runs of an experiment; of methods that obey no request none in which a task comes again.

    Args:
        experiment: with all of its methods, scenarios and seeds.
        methods: names of those that are wanted; none: all.
        scenarios: likewise.
        seeds: likewise; others than the experiment's are allowed.

    Raises:
        ValueError: for a name that the experiment does not have, or where nothing is left.
    """
    asked: Any = (("method", methods, experiment.methods), ("scenario", scenarios, experiment.scenarios))
    for what, given, known in asked:
        for name in given:
            if name not in known:
                there = ", ".join(map(repr, known)) + did_you_mean(name, known)
                raise ValueError(f"experiment {experiment.name} has no {what} {name!r}, it has {there}")
    wanted = product(methods or experiment.methods, scenarios or experiment.scenarios, seeds or experiment.seeds)
    found = [
        Cell(experiment, method, scenario, seed)
        for method, scenario, seed in wanted
        if experiment.methods[method].kind not in OBEY_NOTHING or experiment.scenarios[scenario].name != "relearn"
    ]
    if not found:
        raise ValueError(
            f"{', '.join(methods)} under {', '.join(scenarios)}: a method that obeys no request still has the task "
            "that comes again, and can't learn it; take another scenario or method"
        )
    return found


def resolved(cell: Cell) -> dict[str, Any]:
    """All settings of one run, as plain values."""
    experiment = asdict(cell.experiment)
    return {
        "experiment": cell.experiment.name,
        "method": {"name": cell.method, **experiment["methods"][cell.method]},
        "scenario": {"name": cell.scenario, "kind": experiment["scenarios"][cell.scenario].pop("name")}
        | experiment["scenarios"][cell.scenario],
        "seed": cell.seed,
        **{name: experiment[name] for name in ("stream", "network", "training", "floors")},
    }


def folder_of(cell: Cell, out: Path) -> Path:
    """Folder of a run's results, in that of all experiments."""
    return out.joinpath(*map(slug, (cell.experiment.name, cell.method, cell.scenario)), f"seed{cell.seed}")


def write_settings(cell: Cell, folder: Path) -> None:
    """Save all settings of a run beside its results."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / SETTINGS, yaml.safe_dump(resolved(cell), sort_keys=False, allow_unicode=True).encode())


def is_done(cell: Cell, folder: Path) -> bool:
    """Tell whether the results of a run are there, with these settings."""
    if not (folder / RUN_FILE).is_file() or not (folder / SETTINGS).is_file():
        return False
    found: Any = yaml.safe_load((folder / SETTINGS).read_text())
    return bool(found == resolved(cell))


def slug(name: str) -> str:
    """A name as part of a path: ``AmnesiacHAT, pools`` → ``AmnesiacHAT-pools``."""
    return re.sub(r"[^\w.+λ-]+", "-", name).strip("-") or "-"
