"""Plan of the slots that a stream's tasks need, from its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def departures(stream: Sequence[Any]) -> dict[int, int]:
    """Position of the last training beside which a task is there, for the tasks that a stream requests to unlearn."""
    gone: dict[int, int] = {}
    for position, experience in enumerate(stream):
        requests = getattr(experience, "requests", ())
        for request in (r for r in requests if r.when == "before"):
            gone |= dict.fromkeys(request.tasks, position - 1)
        for task in experience.task_labels:
            gone.pop(int(task), None)  # learned again
        for request in (r for r in requests if r.when != "before"):
            gone |= dict.fromkeys(request.tasks, position)
    return gone


def planned_slots(stream: Sequence[Any], gone: Mapping[int, int]) -> dict[int, int]:
    """Slots of a stream's tasks, as few as their stays allow: each takes the first one that is free when it comes.

    Tasks that the stream declares permanent have all of their slots in common from the first of them on: nobody else
    ever takes one of these. A task that comes again was there all the while, and has the same slot.
    """
    slots: dict[int, int] = {}
    until: list[int] = []  # of each slot, the last training beside which it is taken
    for position, experience in enumerate(stream):
        for task in map(int, experience.task_labels):
            if task in slots:
                continue
            permanent = getattr(experience, "permanent", False)
            free = (number for number, taken in enumerate(until) if taken < position and not permanent)
            slots[task] = next(free, len(until))
            until[slots[task] : slots[task] + 1] = [gone.get(task, len(stream))]
    return slots
