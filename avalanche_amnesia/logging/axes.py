"""X axes of metrics: iterations, tasks or events."""

ITERATION = "iteration"
"""Training iterations so far (the strategy's clock)."""
TASK = "task"
"""Tasks trained so far."""
EVENT = "event"
"""Task ends and unlearning events so far: the axis on which an unlearning has a before and an after."""

AXES = (ITERATION, TASK, EVENT)

EVENT_METRICS = ("JSD", "AccuracyDifference", "Capacity", "Mask", "Trajectory", "Unlearned")
"""Beginnings of the metric names that change with events, whatever phase they are emitted in."""

UNLEARNING_CALLBACKS = ("before_unlearning", "after_unlearning")


def axis_of(name: str, callback: str | None) -> str:
    """The axis of the metric `name`, first seen during `callback` (None: outside any callback).

    Event metrics and everything emitted around an unlearning go over `event`, evaluation over `task`,
    training over `iteration`.
    """
    if name.startswith(EVENT_METRICS) or callback in UNLEARNING_CALLBACKS:
        return EVENT
    if "eval_phase" in name:
        return TASK
    if "train_phase" in name or callback is None:
        return ITERATION
    return TASK if "_eval" in callback else ITERATION
