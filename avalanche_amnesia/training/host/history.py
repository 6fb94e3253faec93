"""What is known of the tasks that were trained, beside the book of those that may be unlearned."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from avalanche_amnesia.training.host.provenance import labels_fingerprint
from avalanche_amnesia.transaction import Transaction


class TaskHistory:
    """When tasks were trained, on what, and whose traces their training can have left in them.

    Attributes:
        counters: task → the strategy's experience counter when it was trained.
        data: remaining task → fingerprint of its data's labels.
        tainted: remaining tasks whose training saw a task that was unlearned later.
        saw: the tasks that can leave a trace in a task that is in training; empty between tasks.
    """

    def __init__(self) -> None:
        self.counters: dict[int, int] = {}
        self.data: dict[int, str] = {}
        self.tainted: set[int] = set()
        self.saw: frozenset[int] = frozenset()

    def end(self, task: int, experience: Any, counter: int, forgotten: Collection[int]) -> None:
        """Enter a task whose training is over.

        Args:
            task: its label.
            experience: its data.
            counter: the strategy's experience counter.
            forgotten: the tasks that were unlearned in the middle of it.
        """
        if self.saw & {*self.tainted, *forgotten}:
            self.tainted.add(task)  # it learned from tasks that are not what the reference has
        self.saw = frozenset()
        self.counters[task] = counter
        self.data[task] = labels_fingerprint(experience)

    def forget(self, tasks: Collection[int], change: Transaction) -> None:
        """Drop what is known of the data of tasks that are gone; ``change`` receives all of it."""
        change.set(self, data={task: digest for task, digest in self.data.items() if task not in tasks})
