"""Sections on the runs themselves: their seconds, settings and versions."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from avalanche_amnesia.lab.report.charts import Axis, dot_chart
from avalanche_amnesia.lab.report.reading import Entry, Run, flat, spread
from avalanche_amnesia.lab.report.sections.section import Row, Section, measured, table_of_seeds
from avalanche_amnesia.lab.report.tables import Table, number, text
from avalanche_amnesia.lab.report.wording import MISSING, seconds, tasks


def cost(entries: Sequence[Entry]) -> Section:
    """Seconds of every request, and of retraining in its place."""
    marks = []
    for entry in entries:
        for after in dict.fromkeys(cost.after for cost in entry.costs):
            at = [cost for cost in entry.costs if cost.after == after]
            both = measured(
                here=spread(cost.unlearn for cost in at if cost.unlearn > 0),
                retrained=spread(cost.retrain for cost in at if cost.retrain > 0),
            )
            if both:
                marks.append((f"{entry.name}, request after task {after}", both))
    names = {"here": "to unlearn", "retrained": "to retrain without the tasks"}
    axis = Axis("seconds (logarithmic)", seconds, "{:g}".format)
    return Section(
        "cost",
        "How long does a request take, and how long retraining?",
        ("Wall-clock time on the machine of the run; each step to the right is ten times as long.",),
        "seconds",
        [dot_chart("Time to unlearn and to retrain", marks, names, axis)] if marks else [],
        table_of_seeds("Seconds", entries, _cost_rows),
    )


def settings(runs: Sequence[Run]) -> Section:
    """Settings and versions, a column for all runs of the same ones."""
    tables = [
        _compared("Settings", "setting", runs, lambda run: flat(run.settings)),
        _compared("Versions", "package", runs, lambda run: run.versions),
    ]
    return Section("settings", "Settings and versions", (), tables=tables)


def _compared(caption: str, what: str, runs: Sequence[Run], of: Callable[[Run], Mapping[str, Any]]) -> Table:
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(json.dumps([run.settings, run.versions], sort_keys=True), []).append(run)
    found = [of(group[0]) for group in alike.values()]
    folders = [os.path.commonpath([run.folder for run in group]) for group in alike.values()]
    names = dict.fromkeys(name for each in found for name in each)
    rows = [[text(name), *(text(_told(each.get(name))) for each in found)] for name in names]
    return Table(caption, (what, *folders), rows)


def _cost_rows(run: Run) -> Iterator[Row]:
    for cost in run.costs:
        times = cost.retrain / cost.unlearn if cost.unlearn else None
        yield {
            "after task": text(cost.after),
            "to unlearn (s)": number(cost.unlearn, seconds),
            "to retrain (s)": number(cost.retrain, seconds),
            "times faster": number(times, lambda value: f"{value:,.0f}×"),
        }


def _told(value: object) -> str:
    if isinstance(value, dict):  # requests
        return "; ".join(f"{tasks(gone)} after task {after}" for after, gone in value.items())
    return MISSING if value is None else str(value)
