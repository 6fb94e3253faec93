"""Event table of a run: one row per finished task and per unlearning, with the metrics measured after that event."""

import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.audit.words import claim_in_words, data_in_words
from avalanche_amnesia.evaluation.figures import Table
from avalanche_amnesia.logging.names import EVENT

_OWN = ("event", "what", "task", "unlearned", "remaining", "affected", "claim", "accuracy")
_ACCURACY = re.compile(r"Top1_Acc_Exp/eval_phase/(?!train_)\w+/Task(\d+)(/Exp\d+)?")
_OF_STREAM = re.compile(r"([^/]+)(/eval_phase/(?!train_)\w+)?")


class EventTable:
    """Table with one row per event (finished task or unlearning) and the metrics logged until the next event.

    Columns: event, what (``trained`` or ``unlearned``), task (trained last), unlearned (tasks, or samples of one in
    words), remaining, affected, claim, accuracy (mean over the remaining tasks, of Avalanche's accuracy per
    experience), and every number of a metric over ``event`` except those of single tasks or layers. Of several
    values of one event the last one counts. A row describes the tasks remaining at that time; only a proof
    changes its claim later.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._accuracies: dict[int, float] = {}
        self._remaining: frozenset[int] | None = None
        self.changed = False

    def add_training(self, event: int, task: int, remaining: Sequence[int] | None) -> None:
        """Add a row for a finished training; `remaining`: tasks not unlearned, None if the strategy can't unlearn."""
        self._add_row({"event": event, "what": "trained", "task": task, "remaining": _task_list(remaining)}, remaining)

    def add_unlearning(self, event: int, task: int, record: UnlearningRecord | None) -> None:
        """Add a row for an unlearning; `record`: record of its changes, None if another package's plugin did it."""
        row: dict[str, Any] = {"event": event, "what": "unlearned", "task": task}
        if record is not None:
            gone = _task_list(record.tasks) if record.task is None else data_in_words(record.plan)
            row |= {"unlearned": gone, "remaining": _task_list(record.remaining)}
            row |= {"affected": _task_list(record.affected), "claim": claim_in_words(record)}
        self._add_row(row, None if record is None else record.remaining)

    def update_claim(self, record: UnlearningRecord) -> None:
        """Update the last unlearning's claim (exact, approximate …) in its row, after a proof succeeded or failed."""
        row = next(row for row in reversed(self._rows) if row["what"] == "unlearned")
        row["claim"], self.changed = claim_in_words(record), True

    def add_number(self, name: str, value: float, axis: str) -> None:
        """Add a logged number to the last event's row, if it is a test accuracy or is plotted over events."""
        if not self._rows:
            return
        row = self._rows[-1]
        if found := _ACCURACY.fullmatch(name):
            self._accuracies[int(found[1])] = value
            of = [a for task, a in self._accuracies.items() if self._remaining is None or task in self._remaining]
            if of:
                row["accuracy"], self.changed = fmean(of), True
        elif axis == EVENT and (found := _OF_STREAM.fullmatch(name)):
            row[found[1]], self.changed = value, True

    def table(self) -> Table:
        """Return the table with all rows so far."""
        self.changed = False
        measured = dict.fromkeys(column for row in self._rows for column in row if column not in _OWN)
        columns = (*_OWN, *measured)
        return Table(columns, tuple(tuple(row.get(column) for column in columns) for row in self._rows))

    def _add_row(self, row: dict[str, Any], remaining: Iterable[int] | None) -> None:
        self._rows.append(row)
        self._accuracies = {}
        self._remaining = None if remaining is None else frozenset(remaining)
        self.changed = True


def _task_list(tasks: Sequence[int] | None) -> str | None:
    return None if tasks is None else ", ".join(map(str, tasks))
