"""Tables of the report page, with a text and an exact value per cell, and all numbers of runs as CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avalanche_amnesia.lab.report.reading import Entry, Evaluation, Run, Spread
from avalanche_amnesia.lab.report.wording import MISSING, over_seeds

CSV_COLUMNS = ("run", "seed", "after", "task", "metric", "value")
_CLOCK = ("SecondsToUnlearn", "SecondsToRetrain", "TimesFaster")


@dataclass(frozen=True)
class TableCell:
    """A table cell: the displayed text, and the exact value for sorting and copying."""

    text: str
    value: str
    is_number: bool = False


Row = Mapping[str, TableCell]


@dataclass(frozen=True)
class Table:
    """A table of the report page, which readers can sort and copy as CSV."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]


def table(caption: str, rows: Sequence[Row]) -> Table:
    """Return a table from at least one row; a row maps columns to cells."""
    return Table(caption, list(rows[0]), [list(row.values()) for row in rows])


def cell(value: float | None, words: Callable[[float], str]) -> TableCell:
    """Return a table cell with a number as text and as exact value, or with a dash for None."""
    return TableCell(MISSING, "", True) if value is None else TableCell(words(value), repr(value), True)


def mean(value: Spread | None, words: Callable[[float], str]) -> TableCell:
    """Return a table cell with mean and range of a number over seeds as text; the cell's exact value is the mean."""
    return TableCell(over_seeds(value, words), "" if value is None else repr(value.mean), True)


def text(content: Any) -> TableCell:
    """Return a table cell with text or an integer."""
    return TableCell(str(content), str(content), isinstance(content, int))


def by_seed(caption: str, entries: Sequence[Entry], rows_of: Callable[[Run], Iterable[Row]]) -> list[Table]:
    """Return all runs' rows as one table with columns for strategy and seed, in a list; empty if there are no rows."""
    rows = [
        {"strategy": text(entry.name), "seed": text(run.seed), **row}
        for entry in entries
        for run in entry.runs
        for row in rows_of(run)
    ]
    return [table(f"{caption} (one row per seed; numbers in full when copied)", rows)] if rows else []


def by_evaluation(caption: str, entries: Sequence[Entry], rows: Callable[[Evaluation], Iterable[Row]]) -> list[Table]:
    """Return a list with one table of all evaluations' rows, with columns for strategy, seed and last trained task."""

    def rows_of_run(run: Run) -> Iterable[Row]:
        return ({"after task": text(moment.task), **row} for moment in run.moments for row in rows(moment))

    return by_seed(caption, entries, rows_of_run)


def csv_of(runs: Sequence[Run]) -> bytes:
    """Return all numbers of runs except times as CSV; equal runs give equal bytes.

    Column ``after`` is the task trained last before the measurement, column ``task`` the measured task, if any.
    """
    of_runs = ((run, moment) for run in runs for moment in run.moments)
    rows = ([run.name, run.seed, moment.task, *row] for run, moment in of_runs for row in _rows(moment))
    return csv_text([CSV_COLUMNS, *rows]).encode(errors="replace")


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV with exact numbers and empty cells for None; quote texts that look like formulas."""
    file = io.StringIO()

    def safe(cell: Any) -> Any:
        return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell

    csv.writer(file, lineterminator="\n").writerows(map(safe, row) for row in rows)
    return file.getvalue()


def _rows(moment: Evaluation) -> Iterator[tuple[Any, str, Any]]:
    """Yield an evaluation as CSV rows (task or None, name, value): tasks, claim of exactness, metrics except times."""
    for name in ("remaining", "unlearned", "unlearned_now"):
        yield from ((task, name, 1) for task in getattr(moment, name))
    yield None, "claim", moment.claim
    for name, of in sorted(moment.numbers.items()):
        if name not in _CLOCK:
            yield from ((task, name, value) for task, value in of.items())
