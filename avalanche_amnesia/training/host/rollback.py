"""Snapshot (copy of a strategy's state in memory), to be restored after an interruption or an error.

A task ends in several steps: its mask is stored, its update is recorded, heads are fitted, the task is entered into the
ledger. An interruption must leave the state before the task or the state after it. So a snapshot is taken before the
first of these steps, and dropped in one assignment after the last. Restoring it may itself be interrupted and repeated.
"""

from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import nn

from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.saving.known_objects import CONTAINERS, entries_of, is_known, is_known_class, known_parts
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import set_attributes
from avalanche_amnesia.training.task_in_training import restore_user_plugins, user_plugin_states

_OF_MODULES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """Copy of all parts of a strategy's state that a task's end, a load or a retraining may change; restored in place.

    It consists of the attributes and containers of known objects (:mod:`~avalanche_amnesia.saving.known_objects`), the
    modules of the networks, and values of tensors. A ``complete`` snapshot has all of them, clock and metrics included,
    and the states of user plugins that have ``state()`` and ``load_state()``. An incomplete one has only values that
    the end of a task changes, and no parameters. Objects of the user are neither stored nor changed.
    """

    def __init__(self, strategy: Strategy, *, complete: bool) -> None:
        self._strategy, self._complete = strategy, complete
        plugins = [plugin for plugin in strategy.plugins if plugin is not strategy.evaluator]
        if complete:
            self._attributes = dict(vars(strategy))
            networks = [each for each in (strategy.model, strategy._criterion) if isinstance(each, nn.Module)]
            with register_all(strategy.model):
                modules = [module for network in networks for module in network.modules()]
                tensors = [t for network in networks for t in (*network.parameters(), *network.buffers())]
            roots = [*plugins, *getattr(strategy.evaluator, "metrics", ())]
        else:
            self._attributes = {name: getattr(strategy, name) for name in ("optimizer", "optimized_param_id")}
            for plugin in plugins:
                if hasattr(type(plugin), "memory_of"):
                    self._attributes |= plugin.memory_of(strategy)
            # Modules and tensors of tasks are added to and removed from the dictionaries of these modules.
            modules, tensors = [strategy.model, *strategy.model.children()], list(strategy.model.buffers())
            roots = [*self._attributes.values(), *(plugin for plugin in plugins if not isinstance(plugin, OF_THE_HOST))]
        optimizer = strategy.optimizer
        roots += [optimizer.state, optimizer.param_groups, optimizer.defaults]
        found = list(known_parts(roots, {id(each): each for each in (strategy, strategy.evaluator)}))
        parts = [each for each in found if isinstance(each, CONTAINERS)]
        parts += [vars(each) for each in (optimizer, *found) if each is optimizer or is_known(each)]
        parts += [part for module in modules for part in _containers_of(module)]
        self._contents = [(part, entries_of(part)) for part in parts]
        self._values = [(each, each.detach().clone(), each.requires_grad, each.grad) for each in tensors]
        self._users = user_plugin_states(strategy) if complete else ()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all stored attributes, containers and tensor values; safe to call again after an interruption."""
        if self._complete:
            set_attributes(self._strategy, self._attributes)
        else:
            vars(self._strategy).update(self._attributes)
        for part, entries in self._contents:
            _restore_container(part, entries)
        for tensor, value, learns, gradient in self._values:
            if not torch.equal(tensor, value):  # an expanded tensor can't be written into
                tensor.detach().copy_(value)
            if tensor.is_leaf:
                tensor.requires_grad_(learns).grad = gradient
        restore_user_plugins(self._users)


def _containers_of(module: nn.Module) -> Iterator[Any]:
    """Yield a module's dicts, lists and sets, to copy them; for a user's class, only ``vars`` and torch's own dicts."""
    yield vars(module)
    known = is_known_class(type(module))
    for name, value in vars(module).items():
        if name in _OF_MODULES or (known and isinstance(value, CONTAINERS)):
            yield value
        elif known and is_known(value):
            yield vars(value)


def _restore_container(part: Any, entries: list[Any]) -> None:
    """Restore the contents ``entries`` of a dict, set or list, in their order; do nothing if they are unchanged."""
    now, half = entries_of(part), len(entries) // 2
    if len(now) == len(entries) and all(map(is_, now, entries)):
        return
    if isinstance(part, dict):  # a class's own clear() and update() may do more than that
        dict.clear(part)
        dict.update(part, zip(entries[:half], entries[half:], strict=True))
    else:
        part.clear()
        (part.update if isinstance(part, set) else part.extend)(entries)


# The task in its last steps ----------------------------------------------------------------------------------------


def begin_task_end(strategy: Strategy) -> None:
    """Before a task's final steps: take a snapshot (copy) of the strategy, to undo failures; later calls do nothing."""
    if not is_finishing(strategy):
        strategy.rollback_point = Snapshot(strategy, complete=False)


def is_finishing(strategy: Strategy) -> bool:
    """Return True while a task is being finished: its training has ended, and it is not in the list of tasks yet."""
    return getattr(strategy, "rollback_point", None) is not None


def finish_task(plugin: Any, strategy: Strategy) -> None:
    """Delete the snapshot of :func:`begin_task_end` if no plugin after ``plugin`` still has to finish the task."""
    # In the order of ``finishing_step``: the mask is stored, the update recorded, the task entered in the ledger.
    if plugin.finishing_step == max(getattr(other, "finishing_step", 0) for other in strategy.plugins):
        strategy.rollback_point = None


def restore_snapshot(strategy: Strategy) -> None:
    """Undo a task's interrupted final steps: restore the snapshot from before them, if there is one, and drop it."""
    if is_finishing(strategy):
        strategy.rollback_point.restore()
        strategy.rollback_point = None


def abort_training(strategy: Strategy) -> None:
    """Undo an interrupted training: restore the snapshot, call each plugin's ``undo_training``; safe to call again."""
    restore_snapshot(strategy)
    strategy.mbatch, strategy.mb_output, strategy.loss = None, None, torch.zeros(())  # the task's samples
    for plugin in strategy.plugins:
        if hasattr(plugin, "undo_training"):
            plugin.undo_training(strategy)
