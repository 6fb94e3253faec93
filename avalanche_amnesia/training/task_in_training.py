"""The task in training: everything that its training needs, and that must not outlive it."""

from __future__ import annotations

from avalanche_amnesia.training.snapshot import TaskSnapshot
from avalanche_amnesia.training.update_rules import Adjuster


class TaskInTraining:
    """One task from the check of its experience to its commit; made and dropped by the plugin that masks or records.

    Subclasses add what a method needs; an attribute is there from the moment on that the method sets it.

    Args:
        task: its label.

    Attributes:
        snapshot: values before the task; None until its training begins.
        adjuster: holds back updates of what other tasks use.
        guards_others: whether the optimizer moves parameters without a gradient too, so that other tasks' own are put
            back after every step.
    """

    adjuster: Adjuster
    guards_others: bool

    def __init__(self, task: int) -> None:
        self.task = task
        self.snapshot: TaskSnapshot | None = None

    @property
    def before(self) -> TaskSnapshot:
        """Values before the task.

        Raises:
            RuntimeError: before its training has begun.
        """
        if self.snapshot is None:
            raise RuntimeError(f"the training of task {self.task} has not begun")
        return self.snapshot
