"""X axes of logged metrics (iterations, tasks, or trainings and unlearnings), and a run's position on them."""

from typing import Any

from avalanche_amnesia.logging.names import EVENT, ITERATION, TASK
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of

AXES = (ITERATION, TASK, EVENT)

NO_TASK = -1
UNLEARNING_CALLBACKS = ("before_unlearning", "after_unlearning")


def axis_of(name: str, callback: str | None, origin: object = None) -> str:
    """Return the x axis of a logged value: its metric's ``axis``, or the one that its name and callback suggest."""
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


class Position:
    """Position of a run on the x axes (iteration, task, event), updated at every Avalanche callback.

    `task` is the label of the task trained last. An experience without a label of its own (none, several, or one that
    its whole stream shares) counts by its number in the stream, else by the number of trainings before it. If the
    strategy was trained before its first callback (loaded, resumed), the position continues from its counters.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.task = NO_TASK
        self.event = 0
        self.in_training = False
        self._started = False
        self._trainings = 0
        self._coming = NO_TASK

    def update(self, callback: str, strategy: Strategy) -> None:
        """Update the run's iteration, task and event at an Avalanche callback."""
        self.iteration = strategy.clock.train_iterations
        if not self._started or callback in ("before_training_exp", "before_eval", "before_unlearning"):
            self._copy_position(strategy)
        if callback == "before_training_exp":
            self.in_training = True
            self._coming = _label_of(getattr(strategy, "experience", None), self._trainings)
        elif callback == "after_training_exp":
            self.in_training = False
            self.task = self._trainings if self._coming == NO_TASK else self._coming
            self._trainings += 1  # Avalanche's own counter changes later
            self.event += 1
        elif callback == "after_unlearning":
            self.event += 1

    def on_axes(self) -> dict[str, Any]:
        """Return the run's position on each x axis: ``{"iteration": 120, "task": 2, "event": 3}``."""
        return {ITERATION: self.iteration, TASK: self.task, EVENT: self.event}

    def _copy_position(self, strategy: Strategy) -> None:
        """Read task and event from the strategy, because a load or an aborted training may have changed them."""
        plugin = unlearning_of(strategy)
        counter = strategy.clock.train_exp_counter
        if plugin is not None:
            self._trainings = plugin.ledger.n_trained
            if plugin.current_task is None:  # a discarded task has not ended
                self.in_training = False
            self.task = plugin.trained[-1] if plugin.trained else NO_TASK
        elif not self.in_training:
            self._trainings = max(counter, self._trainings)
            if not self._started:
                self.task = counter - 1
        if not self._started:
            self._started = True
            self.event = self._trainings + (0 if plugin is None else len(plugin.records))


def _label_of(experience: Any, number: int) -> int:
    """Return an experience's task label, or the experience's number in the stream; see :class:`Position`."""
    labels = getattr(experience, "task_labels", None)
    stream: Any = getattr(experience, "origin_stream", None)
    in_stream = int(getattr(experience, "current_experience", number))
    if labels is None or len(labels) != 1:
        return in_stream
    if hasattr(stream, "__len__") and len(stream) > 1 and len({tuple(other.task_labels) for other in stream}) == 1:
        return in_stream
    return int(labels[0])
