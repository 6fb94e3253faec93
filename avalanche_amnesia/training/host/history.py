"""Counters and fingerprints of the tasks that were trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from avalanche_amnesia.benchmarks.data import labels_fingerprint
from avalanche_amnesia.transaction import Transaction


class TaskHistory:
    """Counters and data of the tasks that were trained, beside the ledger of those that may be unlearned."""

    def __init__(self) -> None:
        self.counters: dict[int, int] = {}
        self.data: dict[int, str] = {}

    def end(self, task: int, experience: Any, counter: int) -> None:
        """Enter a task whose training is over."""
        self.counters[task] = counter
        self.data[task] = labels_fingerprint(experience)

    def forget(self, tasks: Collection[int], change: Transaction) -> None:
        """Drop what is known of the data of tasks that are gone."""
        change.set(self, data={task: digest for task, digest in self.data.items() if task not in tasks})
