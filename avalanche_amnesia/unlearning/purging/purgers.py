"""Purgers, which take tasks out of what a host's plugin or strategy keeps of them: a function per class.

Without this a stock strategy brings a forgotten task back: EWC pulls the weights to anchors that hold it, LwF is
taught by a model that knows it, Replay trains on its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext

Purger = Callable[[Any, UnlearningContext, Transaction], str]
Preparation = Callable[[Any, int], None]
Registered = TypeVar("Registered")
_PURGERS: dict[type, Purger] = {}
_PREPARATIONS: dict[type, Preparation] = {}


def register_purger(*classes: type, before_training: Preparation | None = None) -> Callable[[Purger], Purger]:
    """Decorator: the function cleans plugins (or strategies) of these classes and their subclasses.

    The function gets the plugin, an :class:`UnlearningContext`, and a
    :class:`~avalanche_amnesia.transaction.Transaction` through which it makes its changes (``change.set(plugin,
    memory={})``); it returns one line for the record.

    Args:
        classes: of plugins, or of strategies with a memory of their own.
        before_training: called with the plugin and the task when a training begins, for what a purge has to leave open.
    """

    def register(purger: Purger) -> Purger:
        _PURGERS.update(dict.fromkeys(classes, purger))
        if before_training is not None:
            _PREPARATIONS.update(dict.fromkeys(classes, before_training))
        return purger

    return register


def purger_of(plugin: object) -> Purger | None:
    """The function registered for an object's class or its nearest base, None if there is none."""
    return _nearest(_PURGERS, plugin)


def prepare_training(plugin: object, task: int) -> None:
    """Call what is registered for an object as ``before_training``."""
    prepare = _nearest(_PREPARATIONS, plugin)
    if prepare is not None:
        prepare(plugin, task)


def _nearest(table: Mapping[type, Registered], plugin: object) -> Registered | None:
    return next((table[kind] for kind in type(plugin).__mro__ if kind in table), None)
