"""Look up a strategy's plugins and tasks, and detect a strategy whose loading was interrupted."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from avalanche.core import SupervisedPlugin

from avalanche_amnesia.saving.values import StateError
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.arguments import listed

P = TypeVar("P")


def find_plugin(strategy: Strategy, kind: type[P]) -> P | None:
    """Return the strategy's first plugin of the class ``kind``, or None."""
    return next((plugin for plugin in strategy.plugins if isinstance(plugin, kind)), None)


def unlearning_of(strategy: Strategy) -> Any:
    """Return the strategy's plugin that answers unlearning requests (attribute ``answers_requests``), or None."""
    plugins = getattr(strategy, "plugins", ())  # a strategy that is only logged may have no plugins
    return next((plugin for plugin in plugins if getattr(plugin, "answers_requests", False)), None)


def refuse_second(strategy: Strategy, kind: type[Any]) -> None:
    """Raise ValueError if a strategy has more than one plugin of the class ``kind``."""
    n = sum(isinstance(plugin, kind) for plugin in strategy.plugins)
    if n > 1:
        raise ValueError(
            f"{type(strategy).__name__} has {n} {kind.__name__}s, which would do everything twice: leave one in "
            "plugins=, and none where the strategy brings its own, as AmnesiacHAT does; its options are the strategy's "
            "(trajectory=TrajectoryPlugin(...), unlearning=UnlearningPlugin(deadline=...))"
        )


def remaining_experiences(strategy: Strategy, experiences: Iterable[Any]) -> list[Any]:
    """Return the experiences whose tasks were trained and not unlearned.

    Args:
        strategy: any strategy; without an :class:`UnlearningPlugin` a task counts as trained if the model has its head.
        experiences: a stream, or a list of experiences with task labels.

    Raises:
        TypeError: if an item is not an experience.
    """
    given = listed(experiences, "remaining_experiences(strategy, …)")
    plugin = unlearning_of(strategy)
    if plugin is None:
        tasks = set(getattr(strategy.model, "known_train_tasks_labels", ()))
    else:
        tasks = {*plugin.ledger.remaining, plugin.current_task}
    return [e for e in given if all(int(task) in tasks for task in e.task_labels)]


class UnfinishedLoad(SupervisedPlugin):
    """Plugin, first in a strategy whose loading did not finish, that raises StateError in training and evaluation."""

    # A plugin, so that Avalanche's loops call it before any other plugin.
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def refuse(self, strategy: Strategy, **kwargs: Any) -> None:
        """Raise StateError, because the strategy is loaded only in part."""
        raise StateError(
            f"loading {self._path} into this {type(strategy).__name__} did not finish: load that state again, or "
            "another one, with load_state(strategy, path); or build the strategy again"
        )

    before_training = before_eval = refuse


def refuse_unfinished(strategy: Strategy) -> None:
    """Raise StateError if the last loading of a state into the strategy did not finish."""
    mark = find_plugin(strategy, UnfinishedLoad)
    if mark is not None:
        mark.refuse(strategy)
