"""Find a plugin among a strategy's."""

from typing import Any, TypeVar

P = TypeVar("P")


def find_plugin(strategy: Any, kind: type[P]) -> P | None:
    """The strategy's first plugin of a class, None if it has none."""
    return next((plugin for plugin in strategy.plugins if isinstance(plugin, kind)), None)
