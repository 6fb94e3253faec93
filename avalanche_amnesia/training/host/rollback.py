"""State of a strategy at the end of a training, to go back to until the task is finished.

A task ends in several steps: its mask is kept, its update is recorded, heads are fitted, the task is entered into the
ledger. An interruption, Ctrl-C or an error in any plugin, must leave the state before the task or the state after it.
So everything that these steps may change is stored before the first of them, and dropped in one assignment after the
last. Until then aborting the task restores it first; that may itself be interrupted and repeated.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from operator import is_
from types import FunctionType
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks import CLExperience
from avalanche.benchmarks.utils import AvalancheDataset
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia.object_walk import reachable
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, is_frozen, is_of
from avalanche_amnesia.strategy import Strategy

CONTAINERS = (dict, list, set, deque)
_LONG = 1000
"""Entries of a container from which on those of its entries are not looked at: they are a data set's samples."""


def is_ours(plugin: object) -> bool:
    """Return True if the object's class, or one of its bases, is defined in this package."""
    return is_of(type(plugin), "avalanche_amnesia")


def of_package_and_host(thing: object) -> bool:
    """Return True for containers and for objects of this package and Avalanche, which the end of a task may change."""
    kind: Any = type(thing)
    return _is_written(kind)


def of_anybody(thing: object) -> bool:
    """Return False for long containers, which hold a data set's samples."""
    return not isinstance(thing, (*CONTAINERS, tuple)) or len(thing) < _LONG


# Of objects and containers the contents are stored, which copies nothing. Values of tensors are copied only for
# the given ones. An object with a method ``way_back()`` returns its own restore
# function.
class Contents:
    """Contents of all objects that some lead to and that may be written into, and states of random generators there."""

    def __init__(
        self,
        roots: Iterable[object],
        skip: Iterable[object],
        enter: Callable[[object], bool] = of_package_and_host,
        parts: Iterable[Any] = (),
        tensors: Iterable[Tensor] = (),
    ) -> None:
        found = [thing for _, thing in reachable(list(roots), skip=skip, enter=enter)]
        entered = [thing for thing in found if enter(thing)]
        holders = [*(part for thing in entered for part in _parts(thing)), *parts]
        self._contents = [(part, _entries(part)) for part in holders]
        held = (entry for _, entries in self._contents for entry in entries)
        things = {id(thing): thing for thing in (*held, *found)}
        self._ways_back = [way for thing in things.values() for way in _ways_back(thing)]
        self._values = [(each, each.detach().clone(), each.requires_grad, each.grad) for each in tensors]

    @torch.no_grad()
    def go_back(self) -> None:
        """Give them their contents back; to be called again if it was interrupted."""
        for part, entries in self._contents:
            _refill(part, entries)
        for tensor, value, learns, gradient in self._values:
            if not torch.equal(tensor, value):  # an expanded tensor can't be written into
                tensor.detach().copy_(value)
            if tensor.is_leaf:
                tensor.requires_grad_(learns).grad = gradient
        for way_back in self._ways_back:
            way_back()


def _parts(thing: Any) -> Iterator[Any]:
    """The containers that make up an object: itself, and its attributes."""
    if isinstance(thing, CONTAINERS):
        yield thing
    if hasattr(thing, "__dict__"):
        yield vars(thing)


def _entries(part: Any) -> list[Any]:
    """Entries of a container; of a dict its keys, and then its values."""
    return [*part, *part.values()] if isinstance(part, dict) else list(part)


def _refill(part: Any, entries: list[Any]) -> None:
    """Give a container its old contents, in their order; one that still has them is not touched."""
    now, half = _entries(part), len(entries) // 2
    if len(now) == len(entries) and all(map(is_, now, entries)):
        return
    if isinstance(part, dict):  # a class's own clear() and update() may do more than that
        dict.clear(part)
        dict.update(part, zip(entries[:half], entries[half:], strict=True))
    else:
        part.clear()
        (part.update if isinstance(part, set) else part.extend)(entries)


def _ways_back(thing: Any) -> Iterator[Callable[[], Any]]:
    """Functions that put back the state of a random generator, or the variables that a function captured."""
    if hasattr(type(thing), "way_back"):
        yield thing.way_back()
    elif type(thing) in (torch.Generator, np.random.RandomState):  # torch's own check of instances takes long
        put_back: Callable[[Any], Any] = thing.set_state
        yield partial(put_back, thing.get_state())
    elif isinstance(thing, np.random.Generator):
        yield partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    elif isinstance(thing, random.Random):
        yield partial(thing.setstate, thing.getstate())
    elif isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            with suppress(ValueError):  # a name that the outer function has not bound yet
                yield partial(setattr, cell, "cell_contents", cell.cell_contents)


@cache  # some of the host's classes are slow to compare with
def _is_written(kind: type) -> bool:
    if issubclass(kind, (*CONTAINERS, tuple, Optimizer)):
        return True
    # Modules and data sets are replaced, never written into; an object whose attributes are frozen can't be.
    replaced = issubclass(kind, (nn.Module, AvalancheDataset, CLExperience))
    if replaced or is_frozen(kind) or hasattr(kind, "way_back"):
        return False
    return is_of(kind, "avalanche_amnesia", "avalanche")


# The end of a training ---------------------------------------------------------------------------------------------


# Values of tensors are copied only where they are written in place and no snapshot has the old ones: the model's
# buffers. Plugins of Avalanche, and plugins that one of this package knows (``host_state(strategy)`` returns attributes
# of the strategy and plugins), are stored; a user's plugin is not.
class RollbackPoint:
    """Contents of everything that the end of a task's training may change."""

    def __init__(self, strategy: Strategy) -> None:
        model = strategy.model
        self._strategy = strategy
        self._attributes = {name: getattr(strategy, name) for name in ("optimizer", "optimized_param_id")}
        plugins = [p for p in strategy.plugins if _is_known(p)]
        for plugin in [p for p in plugins if hasattr(type(p), "host_state")]:
            attributes, known = plugin.host_state(strategy)
            self._attributes |= attributes
            plugins += known
        roots = [*plugins, *self._attributes.values()]
        # In the dictionaries of modules tasks' modules and tensors come and go.
        parts = [vars(module) for module in (model, *model.children())]
        parts += [part for held in parts for part in held.values() if isinstance(part, dict)]
        self._contents = Contents(roots, [strategy, strategy.evaluator], parts=parts, tensors=model.buffers())

    def go_back(self) -> None:
        """Put everything back; to be called again if it was interrupted."""
        vars(self._strategy).update(self._attributes)
        self._contents.go_back()


def _is_known(plugin: object) -> bool:
    """Return True if the plugin's own class is defined in Avalanche, or if it derives from this package."""
    brought = type(plugin).__module__.partition(".")[0] == "avalanche" and not isinstance(plugin, OF_THE_HOST)
    return brought or is_ours(plugin)


# The task in its last steps ----------------------------------------------------------------------------------------


def begin_finishing(strategy: Strategy) -> None:
    """Store everything before the first step that ends a task; later calls do nothing."""
    if not is_finishing(strategy):
        strategy.rollback_point = RollbackPoint(strategy)


def is_finishing(strategy: Strategy) -> bool:
    """Return True between the last training step of a task and its entry in the ledger."""
    return getattr(strategy, "rollback_point", None) is not None


def is_last_to_finish(plugin: Any, strategy: Strategy) -> bool:
    """Return True if this plugin is the last one to finish a task."""
    # In the order of ``finishing_step``: the mask is kept, the update recorded, the task entered in the ledger.
    return plugin.finishing_step == max(getattr(other, "finishing_step", 0) for other in strategy.plugins)


def finish(strategy: Strategy) -> None:
    """Make the task a finished one: from here on there is no way back but to unlearn it."""
    strategy.rollback_point = None


def go_back(strategy: Strategy) -> None:
    """Go back to the last step of the training, if the task in training has begun to be finished."""
    if is_finishing(strategy):
        strategy.rollback_point.go_back()
        strategy.rollback_point = None


def abort_training(strategy: Strategy) -> None:
    """Undo a task whose training was interrupted, in every plugin that holds something of it; repeatable."""
    go_back(strategy)
    for plugin in strategy.plugins:
        if hasattr(plugin, "undo_training"):
            plugin.undo_training(strategy)
