"""Runs of JSON lines read back with all that they logged: oracle for what W&B's own files say of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.lab.logging.json_lines import copy_run
from avalanche_amnesia.lab.logging.run_lines import lines_of
from avalanche_amnesia.logging.axes import AXES
from avalanche_amnesia.logging.payloads import Payload
from avalanche_amnesia.logging.run_logger import is_about


@dataclass
class LoggedRun:
    """Contents of a run's log; ``summary`` has the least, largest and last value by name, ``metrics`` each axis."""

    id: str = ""
    name: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str | None] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    records: list[UnlearningRecord] = field(default_factory=list)
    complete: bool = False

    def rows_with(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if name in row]


def read_json_run(folder: str | Path) -> LoggedRun:
    """Read all that a run of JSON lines has logged; of a killed run what is whole, with `complete=False`."""
    run, head = LoggedRun(), next(lines_of(Path(folder)))
    run.id, run.name, run.project = head["id"], head["name"] or "", head["project"]
    run.group, run.job_type, run.config = head["group"] or "", head["job_type"], dict(head["config"])
    run.metrics = dict.fromkeys(AXES)
    copy_run(Path(folder), _Reader(run))
    return run


class _Reader:
    """Fills an :class:`LoggedRun`, with the summary that W&B would make."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = run

    def describe(self, settings: Mapping[str, Any], name: str | None) -> None:
        self._run.config = {**settings, **self._run.config}
        self._run.name = name or self._run.name

    def define(self, metric: str, axis: str) -> None:
        self._run.metrics[metric] = axis

    def log(self, row: Mapping[str, Payload]) -> None:
        self._run.rows.append(dict(row))
        for name, value in row.items():
            if name in AXES or not isinstance(value, float):
                self._run.summary[name] = value
                continue
            seen = self._run.summary.setdefault(name, {"min": value, "max": value})
            self._run.summary[name] = {"min": min(seen["min"], value), "max": max(seen["max"], value), "last": value}

    def note(self, texts: Mapping[str, str]) -> None:
        self._run.summary.update(texts)

    def keep(self, record: UnlearningRecord) -> None:
        self._run.records.append(record)

    def forget(self, tasks: tuple[int, ...]) -> None:
        for name in [name for name in self._run.summary if is_about(name, tasks)]:
            del self._run.summary[name]

    def finish(self, exit_code: int) -> None:
        self._run.complete = True
