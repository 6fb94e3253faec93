"""Settings of a strategy, its optimizer and its plugins, as JSON values."""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from avalanche.core import BasePlugin
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates.base_sgd import PeriodicEval
from torch import nn
from torch.optim import Optimizer

from avalanche_amnesia.strategy import Strategy

OF_THE_HOST = (EvaluationPlugin, PeriodicEval, Clock)
"""Plugins of Avalanche that only count and report, so that their settings do not change the learning."""

_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
_SIMPLE = (*_PLAIN, *_FUNCTIONS, np.generic, torch.dtype, Path, Enum, Optimizer)
_OF_EVALUATION = frozenset({"eval_mb_size", "eval_every", "peval_mode"})


def origin_of(strategy: Strategy) -> dict[str, Any]:
    """Return a strategy's method, settings and seed, as fields of :class:`Provenance` (origin of a model)."""
    seeding = next((plugin for plugin in strategy.plugins if getattr(plugin, "seeds_tasks", False)), None)
    seed = None if seeding is None else seeding.seed
    return {"method": type(strategy).__name__, "options": settings_of(strategy), "seed": seed}


def learning_settings(strategy: Strategy, plugins: Iterable[Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return a strategy's settings, as :func:`settings_of`, without those of evaluation, which may change in a run."""
    learning = [p for p in (strategy.plugins if plugins is None else plugins) if not isinstance(p, OF_THE_HOST)]
    found = settings_of(strategy, learning)
    return {of: {n: value for n, value in own.items() if n not in _OF_EVALUATION} for of, own in found.items()}


def settings_of(strategy: Strategy, plugins: Iterable[Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return a dict of class name to settings, for a strategy, its optimizer and its plugins (or the given ones).

    A setting is an attribute named like a constructor argument, or a frozen data class of options. A function becomes
    its name, an object of this package becomes its class and settings.
    """
    optimizer, criterion = strategy.optimizer, strategy._criterion
    loss = {"class": type(criterion).__name__} | own_settings(criterion)
    found = {type(strategy).__name__: own_settings(strategy) | {"criterion": loss}}
    defaults = {name: value for name, value in optimizer.defaults.items() if _is_simple(value)}
    found[type(optimizer).__name__] = {name: _as_json(value) for name, value in defaults.items()}
    alike = Counter(found.keys())
    for plugin in strategy.plugins if plugins is None else plugins:
        name = type(plugin).__name__
        alike[name] += 1
        found[name if alike[name] == 1 else f"{name} {alike[name]}"] = own_settings(plugin)
    return found


def own_settings(obj: Any) -> dict[str, Any]:
    """Return an object's settings (stored constructor arguments, frozen options) as a dict of name to JSON value."""
    kind: Any = type(obj)
    arguments = _arguments(kind)
    found = {}
    for name, value in getattr(obj, "__dict__", {}).items():
        options = not name.startswith("_") and is_frozen(type(value))
        plain = options and not any(isinstance(getattr(value, f.name), torch.Tensor) for f in fields(value))
        if plain or (name in arguments and _is_setting(value)):
            found[name] = _as_json(value)
    return found


@lru_cache(512)
def _arguments(kind: Any) -> frozenset[str]:
    return frozenset(name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters)


def _is_setting(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_simple(item) for item in (*value.keys(), *value.values()))
    return _is_simple(value) or _is_settings_object(value)


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE) or (isinstance(value, tuple) and all(map(_is_simple, value)))


def is_frozen(kind: type) -> bool:
    """Return True if a class is a frozen data class."""
    return bool(getattr(getattr(kind, "__dataclass_params__", None), "frozen", False))


def _is_settings_object(value: Any) -> bool:
    """Return True for an object of this package, unless it is a module or plugin, because these also contain state."""
    return is_from(type(value), "avalanche_amnesia") and not isinstance(value, (nn.Module, BasePlugin))


def is_from(kind: type, *packages: str) -> bool:
    """Return True if a class, or one of its bases, is defined in one of the packages."""
    return any(base.__module__.partition(".")[0] in packages for base in kind.__mro__)


def _as_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return [_as_json(item) for item in value]
    if isinstance(value, Mapping):  # slots by task
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (torch.dtype, torch.device, Path)):
        return str(value)
    if isinstance(value, _FUNCTIONS):
        return value.__qualname__
    if is_dataclass(value):
        return {"class": type(value).__name__} | {f.name: _as_json(getattr(value, f.name)) for f in fields(value)}
    return {"class": type(value).__name__} | own_settings(value) if _is_settings_object(value) else type(value).__name__
