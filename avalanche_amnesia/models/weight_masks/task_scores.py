"""Scores of trained tasks, from which the next task's came."""

from __future__ import annotations

from collections.abc import Sequence

from avalanche_amnesia.models.task_buffers import TaskBuffers


class TaskScores(TaskBuffers):
    """Scores ``(n_weights,)``, or their code, by task; each task's began as those of the task before it."""

    def descendants(self, tasks: Sequence[int], order: Sequence[int]) -> list[int]:
        """Tasks whose scores came out of these tasks' ones, themselves included: all from the first of them on."""
        first = min((order.index(task) for task in tasks if task in order), default=len(order))
        return [task for task in order[first:] if task in self]

    def last(self, order: Sequence[int]) -> int | None:
        """The last task whose scores are kept; None where there is none."""
        return next((task for task in reversed(order) if task in self), None)

    def retain(self, tasks: Sequence[int]) -> None:
        """Drop the scores of all tasks but these."""
        for task in set(self.tasks) - set(tasks):
            self.drop(task)
