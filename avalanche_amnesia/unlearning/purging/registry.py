"""Adapters that save, load and purge what a host's plugin or strategy keeps of the tasks: one per class.

Without this a stock strategy brings a forgotten task back: EWC pulls the weights to anchors that hold it, LwF is
taught by a model that knows it, Replay trains on its samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.transaction import Transaction


@dataclass(frozen=True)
class PurgeContext:
    """Description of an unlearning, for those who clean up behind it."""

    tasks: tuple[int, ...]
    order: tuple[int, ...]
    writers: tuple[int, ...]
    counters: Mapping[int, int]
    own_parameters: frozenset[str]
    removal: Removal
    model: nn.Module
    in_training: int | None = None

    def trained_after(self, task: int | None) -> bool:
        """Tell whether a task was trained when one of those that go was already there (None: now)."""
        if task not in self.order:
            return True
        return any(self.order.index(gone) < self.order.index(task) for gone in self.tasks)


@dataclass(frozen=True)
class SavedState:
    """State that a plugin keeps, as plain data."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


class StateAdapter(ABC):
    """Saves, loads and purges what one kind of plugin (or strategy) keeps of the tasks that it has seen."""

    @abstractmethod
    def save(self, plugin: Any) -> SavedState:
        """State that the plugin keeps, as plain data."""

    @abstractmethod
    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Put what :meth:`save` returned into a plugin that was built with the same arguments."""

    @abstractmethod
    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Take the tasks that go out of what the plugin keeps; what can't be taken apart is dropped."""

    def before_training(self, plugin: Any, task: int) -> None:
        """Get a plugin ready for a training; by default nothing is needed."""
        return


Purger = Callable[[Any, PurgeContext, Transaction], str]
Adapter = TypeVar("Adapter", bound=type[StateAdapter])
_ADAPTERS: dict[type, StateAdapter] = {}


class PurgerAdapter(StateAdapter):
    """An adapter made of a user's purging function, which neither saves nor loads."""

    def __init__(self, purger: Purger) -> None:
        self.purger = purger

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Call the function."""
        return self.purger(plugin, context, change)

    def save(self, plugin: Any) -> SavedState:
        """Not possible."""
        raise TypeError(
            f"{type(plugin).__name__} has a purger alone, which can't save: register a StateAdapter, "
            f"@register_adapter({type(plugin).__name__})"
        )

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Not possible."""
        self.save(plugin)


def register_adapter(*classes: type) -> Callable[[Adapter], Adapter]:
    """Decorator of a :class:`StateAdapter` class, for plugins or strategies of these classes and their subclasses."""

    def register(adapter: Adapter) -> Adapter:
        _ADAPTERS.update(dict.fromkeys(classes, adapter()))
        return adapter

    return register


def register_purger(plugin_class: type) -> Callable[[Purger], Purger]:
    """Decorator: the function cleans plugins (or strategies) of this class.

    The function gets the plugin, a :class:`PurgeContext` and a :class:`~avalanche_amnesia.transaction.Transaction`,
    through which it makes its changes (``change.set(plugin, memory={})``); it returns one line for the record.
    """

    def register(purger: Purger) -> Purger:
        _ADAPTERS[plugin_class] = PurgerAdapter(purger)
        return purger

    return register


def adapter_of(plugin: object) -> StateAdapter | None:
    """The registered adapter of an object's class or its nearest base, None if there is none."""
    return next((_ADAPTERS[kind] for kind in type(plugin).__mro__ if kind in _ADAPTERS), None)


def keeps_own_state(plugin: object) -> bool:
    """Tell whether it is known, by a full adapter, what an object keeps of the tasks."""
    adapter = adapter_of(plugin)
    return adapter is not None and not isinstance(adapter, PurgerAdapter)
