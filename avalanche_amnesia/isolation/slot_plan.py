"""Plan of the slots that a stream's tasks need, from its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def departures(stream: Sequence[Any]) -> dict[int, int]:
    """Position of the last training beside which a task is there, for the tasks that a stream requests to unlearn.

    Args:
        stream: experiences, with ``requests`` or without.
    """
    gone: dict[int, int] = {}
    for position, experience in enumerate(stream):
        for task in experience.task_labels:
            gone.pop(int(task), None)  # learned again
        for request in getattr(experience, "requests", ()):
            last = position - 1 if request.when == "before" else position
            gone |= dict.fromkeys(request.tasks, last)
    return gone


def planned_slots(stream: Sequence[Any], gone: Mapping[int, int]) -> dict[int, int]:
    """Slots of a stream's tasks, as few as their stays allow: each takes the first one that is free when it comes.

    Args:
        stream: experiences in their order.
        gone: as :func:`departures` returns it; tasks that are not in it stay.
    """
    slots: dict[int, int] = {}
    until: list[int] = []  # of each slot, the last training beside which it is taken
    for position, experience in enumerate(stream):
        for task in map(int, experience.task_labels):
            last = gone.get(task, len(stream))
            slot = slots.get(task)  # a task that comes again was there all the while: it needs the same slot
            if slot is None:
                free = (number for number, taken in enumerate(until) if taken < position)
                slot = next(free, len(until))
            until[slot : slot + 1] = [last]
            slots[task] = slot
    return slots
