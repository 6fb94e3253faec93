"""Parts of a training that a claim rests on: code outside of torch, torchvision, Avalanche and this package.

Such a part may remember anything, and nobody can see that from outside. So it is named and never run, walked or
changed: only objects of closed classes are entered. A network's modules count as closed, because their tensors and
plain attributes are compared between trainings (:func:`attributes_of`).
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, is_frozen, is_of
from avalanche_amnesia.strategy import Strategy

_CLOSED = {"avalanche_amnesia", "avalanche", "torch", "torchvision", "numpy", "PIL", *sys.stdlib_module_names}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
_LEAVES = (*_PLAIN, Tensor, np.ndarray, np.generic, ModuleType)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_LONG = 1000  # longer containers hold samples
_LEADING_OUT = {"origin_stream", "_origin_stream", "benchmark", "_benchmark"}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_CLASS = frozenset(
    (
        *("__module__", "__qualname__", "__doc__", "__init__", "__annotations__", "__dict__", "__weakref__"),
        *("__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl", "__firstlineno__"),
        *("__static_attributes__", "_is_protocol", "__subclasshook__", "__protocol_attrs__"),
    )
)
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_REPLACEABLE = ("step", "zero_grad", "forward", "__call__")
_GLOBAL_HOOKS = (nn.modules.module, torch_optimizer)


def is_closed(thing: Any) -> bool:
    """Return True if a class or function is defined in a closed package."""
    return str(getattr(thing, "__module__", None) or "builtins").partition(".")[0] in _CLOSED


def open_parts(strategy: Strategy) -> tuple[str, ...]:
    """Return the names of all parts outside of closed packages that take part in the strategy's current training."""
    found = [*_of_strategy(strategy), *_of_plugins(strategy), *_of_modules(strategy.model)]
    found += [] if is_closed(type(strategy.optimizer)) else [f"the optimizer {_name(strategy.optimizer)}"]
    found += (f"the loss {name}" for name in _inside([strategy._criterion]))
    found += (f"{name} in the data" for name in _inside([strategy.experience, getattr(strategy, "collate_fn", None)]))
    for place, hooks in (*hooks_of(strategy), *_global_hooks()):
        found += (f"{place} ({name})" for name in _inside(hooks))
    return tuple(dict.fromkeys(found))


def _of_strategy(strategy: Strategy) -> Iterator[str]:
    """Yield the methods and attributes that classes of the user's define, and functions in place of methods."""
    for base in type(strategy).__mro__:
        if not is_closed(base):
            yield from (f"{name} of {base.__name__}" for name in vars(base) if name not in _OF_EVERY_CLASS)
    yield from _replaced(strategy)


def _replaced(thing: Any) -> Iterator[str]:
    """Yield the functions that stand in an object in place of its class's methods."""
    for name, value in vars(thing).items():
        if isinstance(value, (FunctionType, MethodType, partial)) and callable(getattr(type(thing), name, None)):
            yield from (f"{name} of {type(thing).__name__} ({part})" for part in _inside([value], [thing]))


def _of_plugins(strategy: Strategy) -> Iterator[str]:
    """Yield plugins, metrics and loggers of the user's, plugins of Avalanche, and rules given to this package's."""
    evaluator = strategy.evaluator
    watching = (*getattr(evaluator, "metrics", ()), *getattr(evaluator, "loggers", ()))
    for plugin in (*strategy.plugins, *watching):
        name, kind = type(plugin).__name__, type(plugin)
        ours = kind.__module__.partition(".")[0] == "avalanche_amnesia"
        if not is_closed(kind):
            yield _name(plugin)
        elif not (ours or isinstance(plugin, OF_THE_HOST) or plugin in watching):
            yield f"Avalanche's {name}"
        elif ours and plugin not in watching:
            given = [v for v in vars(plugin).values() if not isinstance(v, (nn.Module, *_CONTAINERS))]
            settings = [v for v in given if callable(v) or hasattr(v, "held") or is_frozen(type(v))]
            yield from (f"{part} in {name}" for part in _inside(settings, [strategy]))
        yield from _replaced(plugin)


def _of_modules(model: nn.Module) -> Iterator[str]:
    """Yield the attributes of the user's modules that can't be compared."""
    for _, module in model.named_modules():
        yield from _replaced(module)
        if is_closed(type(module)):
            continue
        if is_of(type(module), "avalanche_amnesia"):  # its attributes change as those of this package's models do
            yield _name(module)
        else:
            for name, value in _attributes(module):
                if not (isinstance(value, (Tensor, nn.Module)) or _is_plain(value) or is_closed_object(value)):
                    yield f"{name} of {type(module).__name__}"


def is_closed_object(value: Any) -> bool:
    """Return True for a closed function, and for an object of a closed class that is no container."""
    if isinstance(value, (*_CONTAINERS, partial, MethodType)):
        return False
    return is_closed(value if isinstance(value, _FUNCTIONS) else type(value))


def _inside(roots: Iterable[Any], skip: Iterable[Any] = ()) -> Iterator[str]:
    """Yield the names of the open functions and objects that closed objects hold."""
    seen, todo = {id(each) for each in skip}, deque(roots)
    while todo:
        each = todo.popleft()
        if isinstance(each, _LEAVES) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _CONTAINERS):
            values = each.values() if isinstance(each, dict) else each
            todo += values if len(each) < _LONG else ()
        elif isinstance(each, MethodType):
            todo += (each.__func__, each.__self__)
        elif not is_closed(each if isinstance(each, _FUNCTIONS) else type(each)):
            yield _name(each)
        elif isinstance(each, partial):
            todo += (each.func, each.args, each.keywords)
        elif not isinstance(each, type):
            held = getattr(each, "__dict__", {})
            todo += [value for name, value in held.items() if name not in _LEADING_OUT]


def _name(thing: Any) -> str:
    """Return the name of an open part: a class for an object, with the line for a lambda or an inner function."""
    if not isinstance(thing, FunctionType):
        kind = thing if isinstance(thing, type) else type(thing)
        return f"{kind.__module__}.{kind.__qualname__}"
    code = thing.__code__
    return f"{thing.__name__.strip('<>')} at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def hooks_of(strategy: Strategy) -> Iterator[tuple[str, list[Any]]]:
    """Yield the hooks of model, parameters, optimizer and loss, and functions in place of their methods, by name."""
    model = strategy.model
    parts = [("optimizer", strategy.optimizer), ("criterion", strategy._criterion)]
    for path, part in (*parts, *model.named_modules(prefix="model"), *model.named_parameters(prefix="model")):
        kinds = {name: getattr(part, name, None) for name in _HOOKS_OF_PARAMETERS} | getattr(part, "__dict__", {})
        for name, value in kinds.items():
            if name.endswith("_hooks") and isinstance(value, dict) and value:
                yield f"{path}.{name}", list(value.values())
            elif name in _REPLACEABLE and callable(value):
                yield f"{path}.{name}", [value]


def _global_hooks() -> Iterator[tuple[str, list[Any]]]:
    for module in _GLOBAL_HOOKS:
        for name, value in vars(module).items():
            if name.startswith("_global") and isinstance(value, dict) and value:
                yield name, list(value.values())


# Attributes that are compared ---------------------------------------------------------------------------------------


def attributes_of(strategy: Strategy) -> dict[str, str]:
    """Return path → value of all attributes of the network's modules and of the loss; tensors as hashes."""
    criterion: Any = strategy._criterion
    modules = criterion.named_modules(prefix="criterion") if isinstance(criterion, nn.Module) else ()
    found: dict[str, str] = {}
    for path, thing in (*strategy.model.named_modules(prefix="model"), *(modules or [("criterion", criterion)])):
        if not (is_of(type(thing), "avalanche_amnesia") or isinstance(thing, _FUNCTIONS)):
            held = _attributes(thing) if path.startswith("model") else [*_attributes(thing), *_tensors(thing)]
            found |= {f"{path}.{name}": _as_text(value) for name, value in held}
    return found


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    held = [(name, value) for name, value in getattr(thing, "__dict__", {}).items() if name not in _OF_EVERY_MODULE]
    if not isinstance(thing, nn.Module) or not is_closed(type(thing)):
        return held
    return [(name, value) for name, value in held if not isinstance(value, Tensor)]  # torch computes them anew


def _tensors(thing: Any) -> list[tuple[str, Tensor]]:
    """Return the registered tensors of a module itself."""
    if not isinstance(thing, nn.Module):
        return []
    return [*thing.named_parameters(recurse=False), *thing.named_buffers(recurse=False)]


def _as_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return tensor_hash(value)
    if _is_plain(value):
        return repr(value)
    size = f" of {len(value)}" if isinstance(value, _CONTAINERS) else ""
    return f"{type(value).__qualname__}{size}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) < _LONG and all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, _CONTAINERS):
        return len(value) < _LONG and all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, np.generic))
