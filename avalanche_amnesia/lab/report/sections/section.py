"""A section, and the tables and charts that most sections show: rows of every seed, lines of every strategy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from avalanche_amnesia.lab.report.charts import Axis, Chart, Series, line_chart
from avalanche_amnesia.lab.report.reading import Entry, Get, Moment, Run
from avalanche_amnesia.lab.report.tables import Table, TableCell, number, table, text

Row = Mapping[str, TableCell]


@dataclass(frozen=True)
class Section:
    """Part of the page; without charts and tables where nothing was measured.

    Attributes:
        key: its id.
        title: a question.
        lead: how to read it, a paragraph each.
        called: in the list of what was not measured; "": it is not in there.
    """

    key: str
    title: str
    lead: Sequence[str]
    called: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def table_of_seeds(caption: str, entries: Sequence[Entry], rows_of: Callable[[Run], Iterable[Row]]) -> list[Table]:
    """A table with the rows of every run behind its strategy and seed; none without rows."""
    rows = [
        {"strategy": text(entry.name), "seed": text(run.seed), **row}
        for entry in entries
        for run in entry.runs
        for row in rows_of(run)
    ]
    return [table(f"{caption} (one row per seed; numbers in full when copied)", rows)] if rows else []


def table_of_moments(caption: str, entries: Sequence[Entry], rows_of: Callable[[Moment], Iterable[Row]]) -> list[Table]:
    """A table with the rows of every moment behind strategy, seed and task; none without rows."""

    def rows_of_run(run: Run) -> Iterable[Row]:
        return ({"after task": text(moment.task), **row} for moment in run.moments for row in rows_of(moment))

    return table_of_seeds(caption, entries, rows_of_run)


def numbers(columns: Mapping[str, tuple[Get, Callable[[float], str]]]) -> Callable[[Moment], Iterator[Row]]:
    """Rows for :func:`table_of_moments`: one of each moment that has any of these numbers."""

    def rows_of(moment: Moment) -> Iterator[Row]:
        found = {name: (get(moment), words) for name, (get, words) in columns.items()}
        if any(value is not None for value, _ in found.values()):
            yield {name: number(value, words) for name, (value, words) in found.items()}

    return rows_of


def lines(
    entries: Sequence[Entry], title: str | Callable[[Entry], str], axis: Axis, *wanted: tuple[str, str, Get]
) -> list[Chart]:
    """A chart of each strategy over its stream, with lines of these roles, names and numbers.

    There is none where nothing was measured of the strategy itself.
    """
    charts = []
    for entry in entries:
        series = []
        for role, name, get in wanted:
            values = ((place, entry.spread(get, place)) for place in range(len(entry.after)))
            there = [(place, value) for place, value in values if value is not None]
            if there:
                series.append(Series(role, name, there))
        if any(each.role == "here" for each in series):
            words = title if isinstance(title, str) else title(entry)
            requests = list(entry.requests)
            charts.append(line_chart(f"{entry.name}: {words}", series, axis, after=entry.after, requests=requests))
    return charts
