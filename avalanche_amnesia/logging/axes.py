"""X axes of metrics: iterations, tasks or events."""

ITERATION = "iteration"
"""Training iterations so far (the strategy's clock)."""
TASK = "task"
"""Tasks trained so far."""
EVENT = "event"
"""Task ends and unlearning events so far: the axis on which an unlearning has a before and an after."""

AXES = (ITERATION, TASK, EVENT)

UNLEARNING_CALLBACKS = ("before_unlearning", "after_unlearning")


def axis_of(name: str, callback: str | None, origin: object = None) -> str:
    """The axis of a value's plot.

    The metric's own, where its class names one (`axis = "event"`). Otherwise everything emitted around an unlearning
    goes over `event`, evaluation over `task`, training over `iteration`.

    Args:
        name: of the value.
        callback: the one that it was first seen in; None: outside any.
        origin: the metric that emitted it; None: not known.

    Raises:
        ValueError: the metric names an axis that there is none of.
    """
    own = getattr(origin, "axis", None)
    if own is not None:
        if own not in AXES:
            raise ValueError(f"{type(origin).__name__}.axis={own!r} is unknown; allowed are {', '.join(AXES)}")
        return str(own)
    if callback in UNLEARNING_CALLBACKS:
        return EVENT
    if "eval_phase" in name:
        return TASK
    if "train_phase" in name or callback is None:
        return ITERATION
    return TASK if "_eval" in callback else ITERATION
