"""Sections on the runs themselves: their seconds, settings and versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from avalanche_amnesia.lab.report.charts import Axis, dot_chart
from avalanche_amnesia.lab.report.reading import Entry, Results, SeedRun, flat, spread
from avalanche_amnesia.lab.report.sections.section import Row, Section, measured, table_of_seeds
from avalanche_amnesia.lab.report.tables import Table, number, text
from avalanche_amnesia.lab.report.wording import MISSING, seconds, tasks


def cost(entries: Sequence[Entry]) -> Section:
    """Seconds of every request, and of retraining in its place."""
    marks = []
    for entry in entries:
        for after in dict.fromkeys(timing["after_task"] for timing in entry.timings):
            at = [timing for timing in entry.timings if timing["after_task"] == after]
            both = measured(
                here=spread(timing["unlearn"] for timing in at if timing["unlearn"] > 0),
                retrained=spread(timing["retrain"] for timing in at if timing["retrain"] > 0),
            )
            if both:
                marks.append((f"{entry.name}, request after task {after}", both))
    names = {"here": "to unlearn", "retrained": "to retrain without the tasks"}
    axis = Axis("seconds (logarithmic)", seconds, "{:g}".format)
    charts = [dot_chart("Time to unlearn and to retrain", marks, names, axis)] if marks else []
    return Section("cost", charts, table_of_seeds("Seconds", entries, _cost_rows))


def settings(groups: Sequence[Sequence[Results]]) -> Section:
    """Settings and versions, a column per folder."""
    runs = [results for group in groups for results in group]
    all_settings = [flat(results.settings) for results in runs]
    all_versions = [results.versions for results in runs]
    tables = []
    for caption, column, found in (("Settings", "setting", all_settings), ("Versions", "package", all_versions)):
        names = dict.fromkeys(name for each in found for name in each)
        rows = [[text(name), *(text(_told(each.get(name))) for each in found)] for name in names]
        tables.append(Table(caption, (column, *(results.folder for results in runs)), rows))
    return Section("settings", tables=tables)


def _cost_rows(run: SeedRun) -> Iterator[Row]:
    for timing in run.timings:
        times = timing["retrain"] / timing["unlearn"] if timing["unlearn"] else None
        yield {
            "after task": text(timing["after_task"]),
            "to unlearn (s)": number(timing["unlearn"], seconds),
            "to retrain (s)": number(timing["retrain"], seconds),
            "times faster": number(times, lambda value: f"{value:,.0f}×"),
        }


def _told(value: object) -> str:
    if isinstance(value, dict):  # requests
        return "; ".join(f"{tasks(gone)} after task {after}" for after, gone in value.items())
    return MISSING if value is None else str(value)
