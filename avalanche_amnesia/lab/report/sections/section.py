"""A section, and the tables and charts that most sections show: rows of every seed, lines of every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from avalanche_amnesia.lab.report.charts import Axis, Chart, Series, line_chart
from avalanche_amnesia.lab.report.prose import LEADS, TITLES
from avalanche_amnesia.lab.report.reading import Entry, Event, SeedRun, Spread
from avalanche_amnesia.lab.report.tables import Table, TableCell, table, text

Row = Mapping[str, TableCell]


@dataclass(frozen=True)
class Section:
    """Part of the page; without charts and tables where nothing was measured."""

    key: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()

    @property
    def title(self) -> str:
        """Title of the section."""
        return TITLES[self.key]

    @property
    def lead(self) -> list[str]:
        """Reading instructions, a paragraph each."""
        return LEADS[self.key].split("\n\n") if LEADS[self.key] else []


def table_of_seeds(caption: str, entries: Sequence[Entry], rows_of: Callable[[SeedRun], Iterable[Row]]) -> list[Table]:
    """A table with the rows of every run behind its strategy and seed; none without rows."""
    rows = [
        {"strategy": text(entry.name), "seed": text(run.seed), **row}
        for entry in entries
        for run in entry.runs
        for row in rows_of(run)
    ]
    return [table(f"{caption} (one row per seed; numbers in full when copied)", rows)] if rows else []


def table_of_events(caption: str, entries: Sequence[Entry], rows_of: Callable[[Event], Iterable[Row]]) -> list[Table]:
    """A table with the rows of every event behind strategy, seed and task; none without rows."""

    def rows_of_run(run: SeedRun) -> Iterable[Row]:
        return ({"after task": text(event["task"]), **row} for event in run.events for row in rows_of(event))

    return table_of_seeds(caption, entries, rows_of_run)


def lines(entry: Entry, title: str, series: Sequence[Series], axis: Axis) -> list[Chart]:
    """Lines of a strategy over its stream; none where nothing was measured of it itself."""
    if all(each.role != "here" for each in series):
        return []
    title, requests = f"{entry.name}: {title}", request_places(entry)
    return [line_chart(title, series, axis, after=entry.after, requests=requests)]


def series_of(entry: Entry, *wanted: tuple[str, str, Callable[[Event], float | None]]) -> list[Series]:
    """Those series of several (role, name, getter of the number) that have numbers."""
    found = []
    for role, name, get in wanted:
        values = ((float(place), entry.spread(get, after)) for place, after in enumerate(entry.after))
        there = [(place, value) for place, value in values if value is not None]
        if there:
            found.append(Series(role, name, there))
    return found


def request_places(entry: Entry) -> list[int]:
    """Places of the events with a request on the axis of the stream."""
    return [place for place, event in enumerate(entry.first.events) if event.get("unlearned_now")]


def measured(**found: Spread | None) -> dict[str, Spread]:
    """Numbers by role, without those that were not measured."""
    return {role: value for role, value in found.items() if value is not None}
