"""Look up a strategy's plugins, the handlers of its events, and its tasks; detect an interrupted loading.

Avalanche calls every plugin at each of the eight events of a training iteration, and its EvaluationPlugin copies the
experience each time, even if no metric or logger handles the event. For small networks this is a fifth of a step. So
:class:`ListenerDispatch` calls only plugins that handle the event.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any, TypeVar

from avalanche.core import SupervisedPlugin
from avalanche.evaluation import PluginMetric
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.saving.known_objects import is_known_class
from avalanche_amnesia.saving.values import StateError
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.arguments import as_list

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
            "plugins=; AmnesiacHAT and others bring their own, with the options trajectory= and unlearning="
        )


def remaining_experiences(strategy: Strategy, experiences: Iterable[Any]) -> list[Any]:
    """Return the experiences whose tasks were trained and not unlearned.

    Args:
        strategy: any strategy; without an :class:`UnlearningPlugin` a task counts as trained if the model has its head.
        experiences: a stream, or a list of experiences with task labels.

    Raises:
        TypeError: if an item is not an experience.
    """
    given = as_list(experiences, "remaining_experiences(strategy, …)")
    plugin = unlearning_of(strategy)
    if plugin is None:
        tasks = set(getattr(strategy.model, "known_train_tasks_labels", ()))
    else:
        tasks = {*plugin.ledger.remaining, plugin.current_task}
    return [e for e in given if all(int(task) in tasks for task in e.task_labels)]


class UnfinishedLoad(SupervisedPlugin):
    """Plugin that marks a strategy whose loading did not finish: it raises StateError in training and evaluation."""

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


# Dispatch of the events of an iteration to the plugins that handle them -----------------------------------------------

EVENTS_OF_ITERATIONS = (
    *("before_training_iteration", "before_forward", "after_forward", "before_backward", "after_backward"),
    *("before_update", "after_update", "after_training_iteration"),
    *("before_eval_iteration", "before_eval_forward", "after_eval_forward", "after_eval_iteration"),
)


def _overrides(listener: object, event: str, silent: type) -> bool:
    """Return True if ``listener`` has a handler for ``event`` other than the empty one of its base class ``silent``."""
    handler = getattr(listener, event, None)
    return handler is not None and getattr(handler, "__func__", handler) is not getattr(silent, event, None)


def listens(plugin: object, event: str) -> bool:
    """Return True if a plugin (for the evaluator also: one of its metrics or loggers) has a handler for ``event``."""
    if isinstance(plugin, EvaluationPlugin):
        own = getattr(type(plugin), event, None) is not getattr(EvaluationPlugin, event, None)  # a subclass's handler
        return (
            own
            or any(_overrides(metric, event, PluginMetric) for metric in plugin.metrics)
            or any(_overrides(logger, event, SupervisedPlugin) for logger in plugin.loggers)
        )
    return _overrides(plugin, event, SupervisedPlugin)


def set_attributes(strategy: Strategy, attributes: Mapping[str, Any]) -> None:
    """Set a strategy's attributes to ``attributes``, and delete all attributes that ``attributes`` lacks."""
    vars(strategy).update(attributes)
    for name in vars(strategy).keys() - attributes.keys():
        vars(strategy).pop(name, None)


def sees_final_gradients(strategy: Strategy, plugin: object) -> bool:
    """Return True if no code changes gradients between a plugin's ``before_update`` and the optimizer's step.

    Avalanche's loop and this package's later plugins do not; a user's later plugin may.
    """
    place = next((i for i, other in enumerate(strategy.plugins) if other is plugin), len(strategy.plugins))
    behind = [other for other in strategy.plugins[place + 1 :] if listens(other, "before_update")]
    handlers = [getattr(other, "before_update") for other in behind]  # noqa: B009 - plugins need no base class
    loop = [getattr(type(strategy), name) for name in ("training_epoch", "_before_update", "optimizer_step")]
    return all(_is_defined_in(handler, "avalanche_amnesia") for handler in handlers) and all(
        _is_defined_in(function, "avalanche_amnesia", "avalanche") for function in loop
    )


def _is_defined_in(function: object, *packages: str) -> bool:
    return str(getattr(function, "__module__", "")).split(".")[0] in packages


def _make_announcer(event: str) -> Callable[..., None]:
    def announce(self: Any, **kwargs: Any) -> None:
        listeners = self._listeners.get(event)
        if listeners is None:
            heard = [plugin for plugin in self.plugins if listens(plugin, event)]
            listeners = self._listeners[event] = [getattr(plugin, event) for plugin in heard]
        for listener in listeners:
            listener(self, **kwargs)

    announce.__name__, announce.__doc__ = f"_{event}", f"Call the plugins that listen to ``{event}``."
    return announce


def dispatch_to(strategy: Strategy, plugins: Sequence[object]) -> None:
    """Replace a strategy's plugin list, so that only ``plugins`` receive events, from the next event on."""
    vars(strategy).update(plugins=list(plugins), _listeners={})


class ListenerDispatch:
    """Mixin for Avalanche's strategy template: looks up event handlers once per experience, not at every event."""

    _listeners: dict[str, list[Any]]

    def __init__(self, **kwargs: Any) -> None:
        self._listeners = {}
        super().__init__(**kwargs)

    def _after_training_exp(self, **kwargs: Any) -> None:
        # Users' plugins first, because weights that they write (an average) belong to the task that is then recorded.
        for plugin in sorted(getattr(self, "plugins"), key=lambda plugin: is_known_class(type(plugin))):  # noqa: B009
            if hasattr(plugin, "after_training_exp"):
                plugin.after_training_exp(self, **kwargs)
        self._listeners = {}

    def _then_clear(self, method: str, **kwargs: Any) -> None:
        """Call Avalanche's ``method``, then clear the cached listeners."""
        getattr(super(), method)(**kwargs)
        self._listeners = {}  # the handlers of Avalanche's evaluator cannot be pickled


for _event in EVENTS_OF_ITERATIONS:
    setattr(ListenerDispatch, f"_{_event}", _make_announcer(_event))
for _method in ("_before_training_exp", "_before_eval_exp", "_after_eval"):
    setattr(ListenerDispatch, _method, partialmethod(ListenerDispatch._then_clear, _method))
