"""Parts of a training that a claim rests on: code outside of torch, torchvision, Avalanche and this package.

Such an open part may remember anything, which is not visible from outside. So it is only named, never run, searched
or changed: only objects of closed classes (of these packages) are searched. A network's modules count as closed,
because their tensors, plain attributes, arrays and functions are compared between trainings (:func:`attributes_of`).
"""

import inspect
import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from avalanche.training.templates import SupervisedTemplate
from blake3 import blake3
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.quasirandom import SobolEngine

from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, is_frozen, is_of
from avalanche_amnesia.strategy import Strategy

_CLOSED = {"avalanche_amnesia", "avalanche", "torch", "torchvision", "numpy", "PIL", *sys.stdlib_module_names}
_STANDARD = (os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
_LEAVES = (*_PLAIN, Tensor, np.ndarray, np.generic, ModuleType)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_CALLED = (*_FUNCTIONS, MethodType, partial)
CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_DRAWING = (torch.Generator, SobolEngine, np.random.Generator, np.random.RandomState, random.Random, GeneratorType)
"""Closed classes whose objects have a state that no task's seed sets: random generators, Python generators."""
LONG = 1000  # longer containers hold samples
LEADING_OUT = {"origin_stream", "_origin_stream", "benchmark", "_benchmark"}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_CLASS = {*vars(type("", (SupervisedTemplate,), {})), "__init__", "__annotations__", "__orig_bases__"} | {
    *("__firstlineno__", "__static_attributes__", "__parameters__")
}
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def is_closed(thing: Any) -> bool:
    """Return True if a class or function is defined in a closed package: torch, Avalanche, numpy, Python's library …"""
    return _is_closed(str(getattr(thing, "__module__", None) or "builtins").partition(".")[0])


@lru_cache(None)
def _is_closed(package: str) -> bool:
    """Return True for the name of a closed package, unless a script has hidden a standard module by one of its own."""
    file = getattr(sys.modules.get(package), "__file__", None) or _STANDARD[0]
    return package in _CLOSED and (package not in sys.stdlib_module_names or file.startswith(_STANDARD))


def open_parts(strategy: Strategy, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all open parts (user code) of the current training; ``options``: arguments of ``train``."""
    kinds = [base for base in type(strategy).__mro__ if not is_closed(base)]
    found = [f"{name} of {base.__name__}" for base in kinds for name in vars(base) if name not in _OF_EVERY_CLASS]
    found += [*_replaced(strategy), *_of_plugins(strategy), *_of_modules(strategy.model)]
    found += [] if is_closed(type(strategy.optimizer)) else [f"the optimizer {_name(strategy.optimizer)}"]
    found += (f"the loss {name}" for name in _inside([strategy._criterion]))
    found += (f"{name} in the data" for name in _inside([strategy.experience]))
    found += (f"{name} given to train" for name in _inside([options]))
    everywhere = (
        item
        for module in (nn.modules.module, torch_optimizer)
        for item in vars(module).items()
        if item[0].startswith("_global")
    )
    for place, hooks in (*hooks_of(strategy), *everywhere):
        found += (f"{place} ({name})" for name in _inside([hooks]))
    parts = (strategy, strategy.optimizer, strategy._criterion, *strategy.plugins, *strategy.model.modules())
    for kind in dict.fromkeys(base for part in parts for base in type(part).__mro__ if is_closed(base)):
        found += (f"{name} of {kind.__name__} ({part})" for name, part in _patches(kind))
    return tuple(dict.fromkeys(found))


def _patches(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the name of each method of a closed class that open code has replaced, and the name of the new function."""
    # A method that was only added (by transformers to nn.Module) has no effect on closed code.
    for name, value in vars(kind).items():
        if isinstance(value, FunctionType) and not is_closed(value):
            source = f"def {name}("  # counts as replaced without a source to read
            with suppress(OSError, TypeError):
                source = inspect.getsource(kind)
            if f"def {name}(" in source:
                yield name, _name(value)


def _replaced(thing: Any) -> Iterator[str]:
    """Yield the names of open functions that replace methods of one object."""
    for name, value in vars(thing).items():
        if _replaces(thing, name, value):
            yield from (f"{name} of {type(thing).__name__} ({part})" for part in _inside([value], [thing]))


def _replaces(thing: Any, name: str, value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, partial)) and callable(getattr(type(thing), name, None))


def _of_plugins(strategy: Strategy) -> Iterator[str]:
    """Yield names of user plugins, metrics, loggers, Avalanche's plugins, and functions in this package's plugins."""
    evaluator = strategy.evaluator
    for plugin in (*strategy.plugins, *getattr(evaluator, "metrics", ()), *getattr(evaluator, "loggers", ())):
        yield from () if is_closed(type(plugin)) else (_name(plugin),)
        yield from _replaced(plugin)
    for plugin in strategy.plugins:
        package, name = type(plugin).__module__.partition(".")[0], type(plugin).__name__
        if package == "avalanche" and not isinstance(plugin, OF_THE_HOST):
            yield f"Avalanche's {name}"
        if package == "avalanche_amnesia":
            given = [v for v in vars(plugin).values() if not isinstance(v, (nn.Module, *CONTAINERS))]
            settings = [v for v in given if callable(v) or hasattr(v, "protected_share") or is_frozen(type(v))]
            yield from (f"{part} in {name}" for part in _inside(settings, [strategy]))


def _of_modules(model: nn.Module) -> Iterator[str]:
    """Yield the names of user subclasses of this package's models, and of attributes without a comparable value."""
    for module in model.modules():
        if is_closed(type(module)):
            continue
        if is_of(type(module), "avalanche_amnesia"):  # its attributes change in every training, like its base class's
            yield _name(module)
            continue
        for name, value in _attributes(module):
            compared = isinstance(value, (nn.Module, Tensor, np.ndarray, *_CALLED)) or _is_plain(value)
            # An iterator or a namespace may change without a trace in its text.
            keeps = type(value).__module__ in sys.stdlib_module_names and not compared
            if keeps or any(True for _ in _inside([value])):
                yield f"{name} of {type(module).__name__}"


def _inside(roots: Iterable[Any], skip: Iterable[Any] = ()) -> Iterator[str]:
    """Yield the names of open functions and objects, and of generators, in ``roots`` and closed objects inside them."""
    seen, todo = {id(each) for each in skip}, deque(roots)
    while todo:
        each = todo.popleft()
        if id(each) in seen or (isinstance(each, _LEAVES) and is_closed(type(each))):
            continue
        seen.add(id(each))
        if isinstance(each, (*_LEAVES, *CONTAINERS)) and not is_closed(type(each)):  # a subclass of a script
            yield _name(each)
        if isinstance(each, CONTAINERS):
            values = [*(each.values() if isinstance(each, dict) else each), getattr(each, "default_factory", None)]
            kinds = set(map(type, values))
            if not all(issubclass(kind, _LEAVES) and is_closed(kind) for kind in kinds):  # quick for many labels
                todo += values
        elif isinstance(each, (MethodType, BuiltinFunctionType, MethodWrapperType)):
            todo += (getattr(each, "__func__", None), each.__self__)
        elif isinstance(each, _DRAWING) or not is_closed(each if isinstance(each, _FUNCTIONS) else type(each)):
            yield _name(each)
        elif isinstance(each, partial):
            todo += (each.func, each.args, each.keywords)
        elif not isinstance(each, type):
            held = getattr(each, "__dict__", {}).items()
            seeds = type(each).__module__.startswith("avalanche_amnesia.")  # its own generators, from (seed, task)
            todo += [v for name, v in held if name not in LEADING_OUT and not (seeds and isinstance(v, _DRAWING))]


def _name(thing: Any) -> str:
    """Return the name of an open part: class of an object, or name, file and line of a function."""
    if not isinstance(thing, FunctionType):
        kind = thing if isinstance(thing, type) else type(thing)
        return f"{kind.__module__}.{kind.__qualname__}"
    code = thing.__code__
    return f"{thing.__name__.strip('<>')} at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def hooks_of(strategy: Strategy) -> Iterator[tuple[str, list[Any]]]:
    """Yield path and hooks of model, parameters, optimizer and loss, and path and function of each replaced method."""
    model = strategy.model
    parts = [("optimizer", strategy.optimizer), ("criterion", strategy._criterion)]
    for path, part in (*parts, *model.named_modules(prefix="model"), *model.named_parameters(prefix="model")):
        kinds = {name: getattr(part, name, None) for name in _HOOKS_OF_PARAMETERS} | getattr(part, "__dict__", {})
        for name, value in kinds.items():
            if name.endswith("_hooks") and isinstance(value, dict) and value:
                yield f"{path}.{name}", list(value.values())
            elif _replaces(part, name, value):
                yield f"{path}.{name}", [value]


# Attributes to compare between trainings ------------------------------------------------------------------------------

Attributes = dict[str, dict[str, str]]
"""Path of a module or of the loss → attribute → value as text; tensors as hashes."""


def attributes_of(strategy: Strategy) -> Attributes:
    """Return path → attribute → value as text, for the network's modules and the loss."""
    criterion: Any = strategy._criterion
    modules = list(criterion.named_modules(prefix="criterion")) if isinstance(criterion, nn.Module) else []
    found: Attributes = {}
    for path, thing in (*strategy.model.named_modules(prefix="model"), *(modules or [("criterion", criterion)])):
        if isinstance(thing, (*_FUNCTIONS, partial)):
            found[path] = _of_function(thing)
        elif not is_of(type(thing), "avalanche_amnesia"):
            own: list[tuple[str, Any]] = []
            if path.startswith("criterion") and isinstance(thing, nn.Module):  # those of the model are what tasks train
                own = [*thing.named_parameters(recurse=False), *thing.named_buffers(recurse=False)]
            found[path] = {name: _as_text(value) for name, value in (*_attributes(thing), *own)}
            if path.startswith("model.backbone"):  # heads of finished tasks are frozen
                found[path]["requires_grad"] = str([p.requires_grad for p in thing.parameters(recurse=False)])
    return found


def changed_attributes(before: Attributes, now: Attributes) -> str:
    """Return, as text, up to three names of changed, new or lost attributes of modules in both arguments; or ``""``."""
    names = [
        f"{path}.{name}"
        for path in before.keys() & now.keys()
        for name in {**before[path], **now[path]}
        if before[path].get(name) != now[path].get(name)
    ]
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    held = [(name, value) for name, value in getattr(thing, "__dict__", {}).items() if name not in _OF_EVERY_MODULE]
    computed = isinstance(thing, nn.Module) and is_closed(type(thing))  # torch computes tensors there in each forward
    return [(name, value) for name, value in held if not (computed and isinstance(value, Tensor))]


def _of_function(thing: Any) -> dict[str, str]:
    """Return argument or ``function`` → text for a loss that is a function, or a partial with arguments."""
    if isinstance(thing, partial):
        given = {str(name): _as_text(value) for name, value in (*enumerate(thing.args), *thing.keywords.items())}
        return _of_function(thing.func) | given
    return {"function": _as_text(thing)}


def _as_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return tensor_hash(value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {blake3(value.tobytes()).hexdigest()}"
    if isinstance(value, _FUNCTIONS):
        return f"{value.__module__}.{value.__qualname__}"
    if _is_plain(value):
        return repr(value)
    size = f" of {len(value)}" if isinstance(value, CONTAINERS) else ""
    return f"{type(value).__qualname__}{size}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) < LONG and all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, CONTAINERS):
        return len(value) < LONG and all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, np.generic))
