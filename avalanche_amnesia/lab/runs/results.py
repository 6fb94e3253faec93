"""Results of runs as files: what was measured, the seconds apart from it, and the numbers once more as a flat table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import avalanche
import torch
import wandb

import avalanche_amnesia
from avalanche_amnesia.lab.runs.observation import Run
from avalanche_amnesia.saving.replacing import replace_file

COLUMNS = ("strategy", "seed", "event", "task", "metric", "value")
"""Columns of ``results.csv``."""


def write_results(folder: str | Path, runs: Sequence[Run], settings: Mapping[str, Any]) -> None:
    """Write ``results.json``, ``results.csv`` and ``timings.json``, each as a whole or not at all.

    The first two hold no seconds: the same runs give the same bytes. ``results.csv`` has a row per number, with the
    columns of ``COLUMNS``: ``event`` is the task after which it was measured, ``task`` the one it is about, if any.

    Args:
        folder: made if it does not exist.
        runs: finished, of distinct names.
        settings: of all runs, as plain values; runs of which these differ in ``seed`` alone are reported as one.

    Raises:
        ValueError: for two runs of one name.
        OSError: if the folder can't be written to.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"runs are written under their names, got {names}: give each a name of its own")
    versions = {
        "avalanche-amnesia": avalanche_amnesia.__version__,
        "avalanche-lib": avalanche.__version__,
        "torch": torch.__version__,
        "wandb": wandb.__version__,
    }
    strategies = {
        run.name: {"events": [seen.to_dict() for seen in run.observations], "unlearnings": run.records} for run in runs
    }
    results = _as_json({"settings": settings, "versions": versions, "strategies": strategies})
    timings = _as_json({run.name: [vars(timing) for timing in run.timings] for run in runs})
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "results.json", results)
    replace_file(folder / "timings.json", timings)
    replace_file(folder / "results.csv", _as_csv(json.loads(results), names))


def _as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _as_csv(results: Mapping[str, Any], names: Sequence[str]) -> bytes:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    seed = results["settings"].get("seed", "")
    for name in names:
        for event in results["strategies"][name]["events"]:
            for metric, task, value in _numbers(event):
                table.writerow([name, seed, event["task"], task, metric, value])
    return text.getvalue().encode()


def _numbers(event: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(metric, task or nothing, value) of every number of an event, and of its claim."""
    for key in sorted(event.keys() - {"task"}):
        yield from _flat(key, event[key])


def _flat(metric: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, dict) and value.keys() == {"tasks", "shares"}:  # a matrix of tasks by tasks
        for task, row in zip(value["tasks"], value["shares"], strict=True):
            yield from _flat(f"{metric}/{task}", dict(zip(map(str, value["tasks"]), row, strict=True)))
    elif isinstance(value, dict):
        for key in sorted(value, key=lambda key: (not key.isdigit(), int(key) if key.isdigit() else 0, key)):
            for inner, task, number in _flat(metric if key.isdigit() else f"{metric}/{key}", value[key]):
                yield inner, key if key.isdigit() else task, number
    elif isinstance(value, list):  # of tasks
        yield from ((metric, str(task), 1) for task in value)
    elif value is not None:
        yield metric, "", value
