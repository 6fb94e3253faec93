"""Tables of the page: every cell with the words that are shown, and the value that is sorted and copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import MISSING, over_seeds


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
