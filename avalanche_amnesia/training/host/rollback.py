"""State of a strategy at the end of a training, to go back to until the task is finished.

A task ends in several steps: its mask is kept, its update is recorded, heads are fitted, the task is entered into the
ledger. Whatever interrupts them, Ctrl-C or an error in any plugin, must leave the state before the task or the state
after it. So all that these steps may change is noted before the first of them, and dropped in one assignment behind the
last: until then giving the task up goes back to here first, and may itself be interrupted and repeated.
"""

from collections import deque
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import torch
from avalanche.benchmarks import CLExperience
from avalanche.benchmarks.utils import AvalancheDataset
from torch import nn
from torch.optim import Optimizer

from avalanche_amnesia.object_walk import reachable
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST
from avalanche_amnesia.strategy import Strategy

_CONTAINERS = (dict, list, set, deque)


# Objects and containers are noted by what they hold, which copies nothing; the values of tensors only where they are
# written in place and no snapshot has the old ones: the model's buffers. Of the host's plugins and the user's those are
# noted that Avalanche brings, or a plugin of this package knows (``host_state(strategy)`` gives attributes of the
# strategy and plugins); others stay as they are. An object with a ``way_back()`` of its own, which returns a function,
# is asked for that.
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
        found = [thing for _, thing in reachable(roots, skip=[strategy, strategy.evaluator], enter=_may_change)]
        holders = [part for thing in found if _may_change(thing) for part in _parts(thing)]
        for module in (model, *model.children()):  # in their dictionaries tasks' modules and tensors come and go
            holders += [vars(module), *(part for part in vars(module).values() if isinstance(part, dict))]
        self._contents = [(part, list(part.items() if isinstance(part, dict) else part)) for part in holders]
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        going_back: list[Any] = [thing for thing in found if hasattr(type(thing), "way_back")]
        self._ways_back = [thing.way_back() for thing in going_back]

    @torch.no_grad()
    def go_back(self) -> None:
        """Put everything back; to be called again if it was interrupted."""
        vars(self._strategy).update(self._attributes)
        for part, contents in self._contents:
            _refill(part, contents)
        for tensor, value in self._values:
            tensor.copy_(value)
        for way_back in self._ways_back:
            way_back()


_OURS, _HOST_TOO = ("avalanche_amnesia",), ("avalanche_amnesia", "avalanche")


def _is_known(plugin: object) -> bool:
    """Tell whether a plugin is of this package, or one that Avalanche brings: its base classes are not enough."""
    brought = type(plugin).__module__.partition(".")[0] == "avalanche" and not isinstance(plugin, OF_THE_HOST)
    return brought or _is_of(type(plugin), _OURS)


def _is_of(kind: type, packages: Collection[str]) -> bool:
    return any(base.__module__.partition(".")[0] in packages for base in kind.__mro__)


def _may_change(thing: object) -> bool:
    """Whether the end of a task may write into an object: containers, and objects of this package and its host."""
    # Modules and data sets are replaced, never written into; an object whose attributes are frozen can't be.
    kind: Any = type(thing)
    return _is_written(kind)


@cache  # some of the host's classes are slow to compare with
def _is_written(kind: type) -> bool:
    if issubclass(kind, (*_CONTAINERS, tuple, Optimizer)):
        return True
    if issubclass(kind, (nn.Module, AvalancheDataset, CLExperience)) or _is_frozen(kind):
        return False
    if hasattr(kind, "way_back"):
        return False
    return _is_of(kind, _HOST_TOO)


def _is_frozen(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _parts(thing: object) -> Iterator[Any]:
    """The containers that make up an object: itself, and its attributes."""
    if isinstance(thing, _CONTAINERS):
        yield thing
    if hasattr(thing, "__dict__"):
        yield vars(thing)


def _refill(part: Any, contents: list[Any]) -> None:
    """Give a container its old contents, in their order; one that still has them is not touched."""
    now = list(part.items() if isinstance(part, dict) else part)
    if len(now) == len(contents) and all(map(_same, now, contents)):
        return
    if isinstance(part, dict):  # a class's own clear() and update() may do more than that
        dict.clear(part)
        dict.update(part, contents)
    else:
        part.clear()
        (part.update if isinstance(part, set) else part.extend)(contents)


def _same(here: Any, there: Any) -> bool:
    if type(here) is tuple and type(there) is tuple and len(here) == len(there) == 2:  # a key and its value
        return here[0] is there[0] and here[1] is there[1]
    return here is there


# The task in its last steps ----------------------------------------------------------------------------------------


def begin_finishing(strategy: Strategy) -> None:
    """Note everything before the first step that ends a task; does nothing from the second one on."""
    if not is_finishing(strategy):
        strategy.rollback_point = RollbackPoint(strategy)


def is_finishing(strategy: Strategy) -> bool:
    """Tell whether a task's training is over, and the task is not finished."""
    return getattr(strategy, "rollback_point", None) is not None


def is_last_to_finish(plugin: Any, strategy: Strategy) -> bool:
    """Whether a task is finished once this plugin has done its part."""
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
