"""Facts that affect a training but are no settings: hooks, replaced methods, tensor values and the user's code."""

import hashlib
import sys
import sysconfig
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from functools import cached_property
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from avalanche_amnesia.bits import bit_sums, tensor_hash
from avalanche_amnesia.models.task_store import Parts
from avalanche_amnesia.object_walk import contents, reachable
from avalanche_amnesia.saving.strategy_settings import learning_settings
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.listening import listens
from avalanche_amnesia.training.host.rollback import is_ours, of_anybody
from avalanche_amnesia.unlearning.assumptions import hooks_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_HOSTS = frozenset({__name__.split(".")[0], "avalanche", "wandb"})
"""Packages whose objects are not followed: strategies, streams and loggers are covered by the state and the data."""
_OF_EVERY_CLASS = frozenset({"__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "__annotations__"})
_WRAPPERS = (staticmethod, classmethod, cached_property, property)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def facts_of(strategy: Strategy) -> dict[str, Any]:
    """Return, by name, the facts that must not change between two steps of a run."""
    model, optimizer = strategy.model, strategy.optimizer
    tensors: dict[str, Tensor] = dict(model.state_dict())
    facts: dict[str, Any] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts |= {f"{name}.requires_grad": p.requires_grad for name, p in model.named_parameters()}
    for at, group in enumerate(optimizer.param_groups):
        place = f"optimizer.param_groups[{at}]"
        facts |= {f"{place}.{name}": repr(value) for name, value in group.items() if name != "params"}
        facts[f"{place}.params"] = [names.get(id(parameter), "another") for parameter in group["params"]]
    for parameter, moments in optimizer.state.items():
        place = f"optimizer.state of {names.get(id(parameter), 'another')}"
        for name, value in moments.items():
            (tensors if isinstance(value, Tensor) else facts)[f"{place}: {name}"] = value
    settings = learning_settings(strategy).items()
    facts |= {f"{of}.{name}": repr(value) for of, own in settings for name, value in own.items()}
    others = [(f"model.{path}", module) for path, module in model.named_modules() if not is_ours(module)]
    others += [(type(plugin).__name__, plugin) for plugin in strategy.plugins if _is_a_script_s(plugin)]
    held = ((f"{path}.{name}", value) for path, thing in others for name, value in vars(thing).items())
    facts |= {place: repr(value) for place, value in held if isinstance(value, (int, float, str)) or callable(value)}
    skip = [strategy, optimizer, strategy.evaluator, *strategy.plugins]
    facts |= dict(memory_of(strategy._criterion, "criterion", skip, Parts(model)))
    facts |= zip(tensors, bit_sums(tensors.values()), strict=True)  # faster than hashes
    facts |= {name: [id(hook) for hook in hooks] for name, hooks in hooks_of(strategy)}
    return {name: fact for name, fact in facts.items() if not name.endswith(".training")}  # evaluations change it


def _is_a_script_s(plugin: Any) -> bool:
    """Return True if a plugin is the user's own and listens to no evaluation event, so evaluations cannot change it."""
    evaluates = any("_eval" in event and listens(plugin, event) for event in dir(plugin))
    return not evaluates and not type(plugin).__module__.startswith("avalanche")


def script_code(roots: Iterable[object], skip: Collection[object] = ()) -> list[str]:
    """Return sorted lines that describe the code reachable from some objects: functions, classes, and their contents.

    Attributes of the user's classes are followed, and functions that a script put into classes of installed packages.
    For instances of the user's classes only numbers count: the rest may be caches.
    """
    reached = [thing for _, thing in reachable(list(roots), skip=skip, enter=of_anybody)]
    functions = [thing for thing in reached if isinstance(thing, (FunctionType, MethodType))]
    kinds = {type(thing) for thing in (*roots, *reached)}
    patches = [
        value for kind in kinds if _is_installed(kind) for value in vars(kind).values() if type(value) is FunctionType
    ]
    stack: list[Any] = [*functions, *kinds, *patches]
    objects = [thing for thing in reached if not _is_installed(type(thing))]
    numbers = ((thing, *held_by) for thing in objects for held_by in held(thing) if type(held_by[1]) in (int, float))
    lines = {f"{type(thing).__qualname__}{place} {value}" for thing, place, value in numbers}
    seen = {id(thing): thing for thing in skip}  # keeps the objects alive, so that no id is used twice
    while stack:
        thing = stack.pop()
        if isinstance(thing, (*_PLAIN, Tensor, CodeType, ModuleType)) or id(thing) in seen or _is_installed(thing):
            continue  # plain values are in the line of their owner
        seen[id(thing)] = thing
        name = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
        parts = dict(_parts(thing))
        lines |= {f"{name}{place} {_as_text(part)}" for place, part in parts.items()}
        stack += parts.values()
    return sorted(lines)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a function, class or instance with their places in it."""
    if isinstance(thing, type):
        yield from ((f".base[{at}]", base) for at, base in enumerate(thing.__bases__))
        yield from ((f".{name}", value) for name, value in vars(thing).items() if name not in _OF_EVERY_CLASS)
        return
    if isinstance(thing, FunctionType):
        yield ".code", thing.__code__
    elif isinstance(thing, _WRAPPERS):
        yield from ((f".{name}", getattr(thing, name, None)) for name in ("__func__", "func", "fget", "fset"))
    else:
        yield ".class", type(thing)
    yield from held(thing)


def _as_text(part: object) -> str:
    """Return text for a plain value, a tensor or code, and the class name for any other object."""
    if isinstance(part, _PLAIN):
        return repr(part)
    if isinstance(part, Tensor):
        return tensor_hash(part)
    if isinstance(part, np.ndarray):
        return f"{part.dtype} {part.shape} {hashlib.sha256(part.tobytes()).hexdigest()}"
    if isinstance(part, CodeType):  # without the docstring, a function's first constant
        constants = [_as_text(constant) for constant in part.co_consts[not part.co_name.startswith("<") :]]
        return f"{part.co_code.hex()} {part.co_names} {constants}"
    return type(part).__qualname__


def _is_installed(thing: Any) -> bool:
    """Return True for a class or function of an installed package, and for an instance of a class in ``_HOSTS``."""
    is_named = isinstance(thing, (type, FunctionType, BuiltinFunctionType))
    top = str((thing if is_named else type(thing)).__module__).split(".")[0]
    if not is_named or top == "__main__":  # the user's script, although a worker's file is not
        return top in _HOSTS
    module = sys.modules.get(top)
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return top in {*_HOSTS, *sys.stdlib_module_names} or any(place.startswith(_INSTALLED) for place in places)


def memory_of(
    root: object, name: str, skip: Iterable[object] = (), beside: Container[object] | None = None
) -> tuple[tuple[str, str], ...]:
    """Return path and value of every reachable tensor and number; tensors as hashes.

    Numbers in attributes, containers, closures and the globals of functions are included. Two calls return the same
    result as long as none of these values changes.
    """
    found: list[tuple[str, str]] = []
    for path, thing in reachable(root, name, skip, beside=beside):
        if isinstance(thing, Tensor):
            found.append((path, tensor_hash(thing)))
        elif not isinstance(thing, type):
            numbers = ((place, value) for place, value in held(thing) if type(value) in (int, float))
            found += [(f"{path}{place}", repr(value)) for place, value in numbers]
    return tuple(found)


def held(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct contents of an object; for a function, also the globals that it uses."""
    yield from contents(thing)
    if isinstance(thing, MethodType):
        yield ".__func__", thing.__func__
    elif isinstance(thing, FunctionType):
        yield from ((f".<global>.{name}", value) for name, value in _globals(thing.__code__, thing.__globals__))


def _globals(code: CodeType, around: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the globals that code uses, also in nested functions, and the attributes it may use of global modules."""
    for name in code.co_names:
        value = around.get(name)
        if isinstance(value, ModuleType):
            inside = vars(value)
            yield from ((f"{name}.{other}", inside[other]) for other in code.co_names if other in inside)
        elif name in around:
            yield name, value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant, around)
