"""Find a plugin among a strategy's."""

from typing import Any, TypeVar

P = TypeVar("P")


def find_plugin(strategy: Any, kind: type[P]) -> P | None:
    """The strategy's first plugin of a class, None if it has none."""
    return next((plugin for plugin in strategy.plugins if isinstance(plugin, kind)), None)


def unlearning_of(strategy: Any) -> Any:
    """The strategy's plugin that answers requests, by its class attribute ``answers_requests``; None if it has none."""
    return next((plugin for plugin in strategy.plugins if getattr(plugin, "answers_requests", False)), None)


def refuse_second(strategy: Any, kind: type[Any]) -> None:
    """Raise if a strategy has two plugins of a class that keeps records of its tasks."""
    n = sum(isinstance(plugin, kind) for plugin in strategy.plugins)
    if n > 1:
        raise ValueError(
            f"{type(strategy).__name__} has {n} {kind.__name__}s, which would do everything twice: leave one in "
            "plugins=, and none where the strategy brings its own, as AmnesiacHAT does; its options are the strategy's "
            "(trajectory=TrajectoryPlugin(...), deadline=...)"
        )
