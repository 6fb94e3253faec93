"""Registry of purgers: functions, one per class, that remove tasks from a plugin's or strategy's state.

Without purgers an Avalanche strategy would relearn an unlearned task: EWC pulls weights to anchors that include it, LwF
distils a model trained on it, and Replay trains on its samples. Learned state without a purger raises an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from avalanche.benchmarks import CLExperience
from avalanche.training.templates.base import BaseTemplate
from torch import Tensor, nn
from torch.utils.data import Dataset

from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.saving.known_objects import known_parts
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext

Purger = Callable[[Any, UnlearningContext, Transaction], str]
Preparation = Callable[[Any, int], None]
Registered = TypeVar("Registered")
_PURGERS: dict[type, Purger] = {}
_PREPARATIONS: dict[type, Preparation] = {}


def register_purger(*classes: type, before_training: Preparation | None = None) -> Callable[[Purger], Purger]:
    """Register the decorated function, a purger, to remove tasks from the state of plugins and strategies.

    The function gets the plugin, an :class:`UnlearningContext`, and a
    :class:`~avalanche_amnesia.transaction.Transaction`. It makes all changes by the transaction (``change.set(plugin,
    memory={})``), and returns one line for the record.

    Args:
        classes: classes of plugins, or of strategies with stored state.
        before_training: function called with plugin and task when a training begins, to complete a purge.

    Raises:
        TypeError: if ``classes`` is empty or contains a non-class, or the purger is no function.
        ValueError: if a class already has another purger; a function of the same name replaces the old one.
    """
    wrong = [kind for kind in classes if not isinstance(kind, type)]
    if wrong or not classes:
        given = f"got {wrong[0]!r}" if wrong else "got none"
        raise TypeError(f"register_purger takes the classes of plugins, @register_purger(ThePlugin), {given}")

    def register(purger: Purger) -> Purger:
        if not callable(purger):
            raise TypeError(f"a purger is a function (plugin, context, change) -> str, got {purger!r}")
        for kind in classes:
            other = _PURGERS.get(kind, purger)
            if _qualified_name(other) != _qualified_name(purger):
                raise ValueError(
                    f"{kind.__name__} has the purger {_qualified_name(other)}: give the new one its name to replace it"
                )
        _PURGERS.update(dict.fromkeys(classes, purger))
        if before_training is not None:
            _PREPARATIONS.update(dict.fromkeys(classes, before_training))
        return purger

    return register


def _qualified_name(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


def purger_of(plugin: object) -> Purger | None:
    """Return the purger (function that removes tasks from the state) of the plugin's class or nearest base, or None."""
    return _lookup_by_class(_PURGERS, plugin)


def prepare_training(plugin: object, task: int) -> None:
    """Before a task's training: call the ``before_training`` function registered for the plugin's class, if any."""
    prepare = _lookup_by_class(_PREPARATIONS, plugin)
    if prepare is not None:
        prepare(plugin, task)


def _lookup_by_class(table: Mapping[type, Registered], plugin: object) -> Registered | None:
    return next((table[kind] for kind in type(plugin).__mro__ if kind in table), None)


OF_EVERY_STRATEGY = frozenset(
    (
        *("model", "optimizer", "optimized_param_id", "plugins", "evaluator", "clock", "_criterion"),
        *("experience", "current_eval_stream", "_eval_streams", "adapted_dataset", "dataloader"),
        *("mbatch", "mb_output", "loss", "rollback_point", "_listeners"),
    )
)
"""Attributes of every Avalanche strategy. No purger is needed, because this package cleans all but mini-batch data."""


class UnknownStateError(RequestError):
    """Error raised if a plugin or strategy has learned state and no purger to clean it; nothing was changed."""


UnknownState = Sequence[tuple[object, str]]
"""Pairs: a plugin, strategy or criterion without a purger, and the name of its attribute that holds learned state."""


def unknown_state(strategy: Strategy, objects: Iterable[object]) -> UnknownState:
    """Find learned state in ``objects``, which no function can clean; return pairs (object, its attribute's name)."""
    others = [strategy.optimizer, strategy.evaluator, *strategy.plugins]
    with register_all(strategy.model) as model:
        others += [*model.modules(), *model.parameters(), *model.buffers()]
    known: dict[int, object] = {id(each): each for each in others}
    return [(obj, name) for obj in objects if (name := learned_state(obj, known)) is not None]


def refuse_unknown_state(unknown: UnknownState) -> None:
    """Raise UnknownStateError if ``unknown`` lists any learned state that no purger can clean of unlearned tasks."""
    if unknown:
        names = ", ".join(f"{type(plugin).__name__} (in its {name})" for plugin, name in unknown)
        first = type(unknown[0][0]).__name__
        raise UnknownStateError(
            f"nothing was changed: {names} keep what was learned, and no purger cleans it. Write a function (plugin, "
            f"context, change) -> str under @register_purger({first}), or give allow_unknown=True (see plan.unpurged)"
        )


def learned_state(obj: object, others: Mapping[int, object] = {}) -> str | None:
    """Return the name of the first attribute (or ``"state()"``) of an object that holds learned state, or None.

    Learned state is a tensor, array, data set, experience, or module with tensors: in the attribute itself, or in
    containers and objects of Avalanche and this package there. Objects in ``others`` (by id) do not count. For an
    object with ``load_state``, the result of ``state()`` is searched. Objects of other classes are not searched.
    """
    if hasattr(type(obj), "load_state"):
        held = {"state()": getattr(obj, "state")()}  # noqa: B009 - any class may have it
    elif isinstance(obj, BaseTemplate):
        held = own_attributes(obj)
    else:
        tensors = [*obj.named_parameters(), *obj.named_buffers()] if isinstance(obj, nn.Module) else []
        held = {**dict(tensors), **getattr(obj, "__dict__", {})}
    seen = dict(others)
    return next((name for name, value in held.items() if any(map(_is_state, known_parts([value], seen)))), None)


def own_attributes(strategy: object) -> dict[str, Any]:
    """Return a strategy's attributes as a dict of name to value, without those that every Avalanche strategy has."""
    return {name: value for name, value in vars(strategy).items() if name not in OF_EVERY_STRATEGY}


def _is_state(obj: Any) -> bool:
    if isinstance(obj, Tensor):
        return obj.numel() > 0
    if isinstance(obj, nn.Module):
        return any(True for _ in (*obj.parameters(), *obj.buffers()))
    if isinstance(obj, np.ndarray):
        return obj.size > 0 and obj.dtype.kind in "fciub"
    if isinstance(obj, (CLExperience, Dataset)) or type(obj).__name__.endswith("Dataset"):
        return not hasattr(obj, "__len__") or len(obj) > 0
    return False
