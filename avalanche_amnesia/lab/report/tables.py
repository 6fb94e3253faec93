"""Tables: of the page, each cell with its words and the value that is sorted and copied; and all numbers as CSV."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avalanche_amnesia.lab.report.reading import Moment, Run, Spread
from avalanche_amnesia.lab.report.wording import MISSING, over_seeds

CSV_COLUMNS = ("run", "seed", "after", "task", "metric", "value")
_CLOCK = ("SecondsToUnlearn", "SecondsToRetrain", "TimesFaster")
_HISTORY = "Figure/AccuracyMatrix/table"


@dataclass(frozen=True)
class TableCell:
    """A cell: its words, and the value behind them; a number in full."""

    text: str
    value: str
    is_number: bool = False


@dataclass(frozen=True)
class Table:
    """A table that can be sorted and copied as CSV."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]


def table(caption: str, rows: Sequence[Mapping[str, TableCell]]) -> Table:
    """A table of at least one row, column → cell."""
    return Table(caption, list(rows[0]), [list(row.values()) for row in rows])


def number(value: float | None, words: Callable[[float], str]) -> TableCell:
    """A cell with a number; a dash for None."""
    return TableCell(MISSING, "", True) if value is None else TableCell(words(value), repr(value), True)


def mean(value: Spread | None, words: Callable[[float], str]) -> TableCell:
    """A cell with a number over seeds; its value is the mean."""
    return TableCell(over_seeds(value, words), "" if value is None else repr(value.mean), True)


def text(content: Any) -> TableCell:
    """A cell with words, or a task's number."""
    return TableCell(str(content), str(content), isinstance(content, int))


def csv_of(runs: Sequence[Run]) -> bytes:
    """All numbers of runs as one flat table, without seconds: the same runs give the same bytes.

    ``after`` is the task behind which a number was measured, ``task`` the one it is about, if any.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for run in runs:
        seed = "" if run.seed is None else run.seed
        for moment in run.moments:
            writer.writerows([run.name, seed, moment.task, *row] for row in _rows(moment))
    return file.getvalue().encode()


def _rows(moment: Moment) -> Iterator[tuple[Any, str, Any]]:
    """(task or nothing, metric, value)."""
    for name in ("remaining", "unlearned", "unlearned_now"):
        yield from ((task, name, 1) for task in getattr(moment, name))
    yield "", "claim", moment.claim or ""
    for name, of in sorted(moment.numbers.items()):
        if name not in _CLOCK:
            yield from (("" if task is None else task, name, value) for task, value in of.items())
    for name, (columns, *rows) in sorted(moment.tables.items()):
        if name != _HISTORY:  # every moment has its own row of it
            yield from (
                (column, f"{name}/{row[0]}", v) for row in rows for column, v in zip(columns[1:], row[1:], strict=True)
            )
