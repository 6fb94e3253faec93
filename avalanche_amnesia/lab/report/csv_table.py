"""All numbers of runs as one flat table, taken from their logs; without seconds: the same runs give the same bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from avalanche_amnesia.lab.report.reading import Moment, Run

COLUMNS = ("run", "seed", "after", "task", "metric", "value")
_CLOCK = ("SecondsToUnlearn", "SecondsToRetrain", "TimesFaster")
_HISTORY = "Figure/AccuracyMatrix/table"


def csv_of(runs: Sequence[Run]) -> bytes:
    """A row per number: ``after`` is the task behind which it was measured, ``task`` the one it is about, if any."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for run in runs:
        seed = "" if run.seed is None else run.seed
        for moment in run.moments:
            table.writerows([run.name, seed, moment.task, *row] for row in _rows(moment))
    return text.getvalue().encode()


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
