"""The part of a stream that a strategy has learned and not unlearned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from avalanche_amnesia.training.host.arguments import listed
from avalanche_amnesia.training.host.lookup import unlearning_of


def remaining_experiences(strategy: Any, experiences: Iterable[Any]) -> list[Any]:
    """Those experiences whose tasks the strategy has: neither future nor unlearned ones.

    Args:
        strategy: any strategy; without an :class:`UnlearningPlugin` what its model has heads for decides.
        experiences: a stream, or a list of experiences with task labels.

    Raises:
        TypeError: for what are no experiences, a benchmark say.
    """
    given = listed(experiences, "remaining_experiences(strategy, …)")
    plugin = unlearning_of(strategy)
    if plugin is None:
        tasks = set(getattr(strategy.model, "known_train_tasks_labels", ()))
    else:
        tasks = {*plugin.ledger.remaining, plugin.current_task}
    return [e for e in given if all(int(task) in tasks for task in e.task_labels)]
