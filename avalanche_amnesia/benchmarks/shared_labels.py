"""Streams whose experiences have one task label: class- and domain-incremental ones, as the host makes them."""

from typing import Any


def label_of_several(task: int, n: int) -> str:
    """Refusal of one of several experiences with one task label, and the way out."""
    return (
        f"training of task {task}: it is already trained and still remains, and {n} experiences of this stream have "
        "that task label, as in a class- or domain-incremental stream. Here every experience is a task of its own: "
        "give each its label, with SplitMNIST(..., return_task_id=True) and the like, nc_benchmark(..., "
        "task_labels=True), or task_incremental_benchmark(benchmark, reset_task_labels=True); or unlearn the task first"
    )


def why_trained(experience: Any) -> str:
    """Refusal of an experience whose task label is that of a task which remains, and the way out."""
    task = int(experience.task_labels[0])
    stream = getattr(experience, "origin_stream", None) or [experience]
    n = sum(list(other.task_labels) == [task] for other in stream)
    if n > 1:
        return label_of_several(task, n)
    return f"task {task} is already trained and remains: unlearn it first, or give the new data a task label of its own"
