"""Collect facts that affect a training but are no settings: hooks, replaced methods, tensors and the user's code."""

import hashlib
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cached_property, partial
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import state_hashes, tensor_hash
from avalanche_amnesia.saving.strategy_settings import is_of, learning_settings
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import listens
from avalanche_amnesia.unlearning.assumptions import CONTAINERS, LEADING_OUT, LONG, attributes_of, hooks_of

_PLAIN = (bool, int, float, complex, range, str, bytes, type(None), type(...), PurePath, Enum, np.generic)
_VALUES = (*_PLAIN, torch.dtype, torch.device, torch.Size, Tensor, np.ndarray)
_HOSTS = frozenset({__name__.split(".")[0], "avalanche", "wandb"})
"""Packages whose objects are not followed: strategies, streams and loggers are covered by the state and the data."""
_OF_EVERY_CLASS = frozenset({"__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "__annotations__"})
_LEAVES = (*_VALUES, CodeType, ModuleType, torch.fx.Graph, torch.fx.Node)  # a graph's code says what it computes
_LEFT_OUT = LEADING_OUT | {"training"}  # the mode of a module, which evaluations change
_WRAPPERS = (staticmethod, classmethod, cached_property, property)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def facts_of(strategy: Strategy) -> dict[str, Any]:
    """Return name → value of the facts about a strategy that must not change between two steps of a run."""
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
    others = [
        (f"model.{path}", module)
        for path, module in model.named_modules()
        if not is_of(type(module), "avalanche_amnesia")
    ]
    others += [(type(plugin).__name__, plugin) for plugin in strategy.plugins if _is_a_script_s(plugin)]
    held = ((f"{path}.{name}", value) for path, thing in others for name, value in vars(thing).items())
    facts |= {place: repr(value) for place, value in held if isinstance(value, (int, float, str)) or callable(value)}
    held = ((f"{path}.{name}", value) for path, of in attributes_of(strategy).items() for name, value in of.items())
    facts |= {place: value for place, value in held if place.startswith("criterion")}
    facts |= state_hashes(tensors)
    facts |= {name: [id(hook) for hook in hooks] for name, hooks in hooks_of(strategy)}
    return {name: fact for name, fact in facts.items() if not name.endswith(".training")}  # evaluations change it


def _is_a_script_s(plugin: Any) -> bool:
    """Return True if a plugin is the user's own and listens to no evaluation event, so evaluations cannot change it."""
    evaluates = any("_eval" in event and listens(plugin, event) for event in dir(plugin))
    return not evaluates and not type(plugin).__module__.startswith("avalanche")


def script_code(roots: Iterable[object], skip: Iterable[object] = ()) -> list[str]:
    """Return sorted lines, a place and its value each, that describe the code and the plain values of some objects.

    Functions and classes of the script count with the values in their closures, defaults and globals. Containers and
    attributes are followed; an object met before is only named. Values are numbers, text (with size and time of a file
    that it names) and tensors; those in objects of this package and of Avalanche are covered by state and data.
    """
    lines: set[str] = set()
    names = {id(thing): type(thing).__qualname__ for thing in skip}
    known: list[Any] = [*skip]  # keeps the objects alive, so that no id is used twice
    numbers = Counter[str]()
    todo: deque[tuple[str, Any, bool]] = deque((f"[{at}]", thing, True) for at, thing in enumerate(roots))
    while todo:
        place, thing, told = todo.popleft()
        if not isinstance(thing, _LEAVES) and id(thing) not in names:
            known.append(thing)
            inside = isinstance(thing, CONTAINERS)
            kind = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
            numbers[kind] += not inside
            names[id(thing)] = name = place if inside else f"{kind} {numbers[kind]}".removesuffix(" 1")
            tells = told if inside else isinstance(thing, (type, FunctionType)) or not _is_installed(thing)
            todo += ((f"{name}{at}", part, tells) for at, part in _parts(thing))
        if told:
            lines.add(f"{place} {names[id(thing)] if id(thing) in names else _as_text(thing)}")
    return sorted(lines)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield a pair (place, part) for each part of a function, class, container or object, such as ``.code``."""
    if isinstance(thing, type):
        if _is_installed(thing):
            patches = (value for value in vars(thing).items() if isinstance(value[1], FunctionType))
            yield from ((f".{name}", value) for name, value in patches if not _is_installed(value))
        else:
            yield from ((f".base[{at}]", base) for at, base in enumerate(thing.__bases__))
            yield from ((f".{name}", value) for name, value in vars(thing).items() if name not in _OF_EVERY_CLASS)
    elif isinstance(thing, FunctionType):
        if not _is_installed(thing):
            yield from ((".code", thing.__code__), (".default", thing.__defaults__), (".named", thing.__kwdefaults__))
            yield from ((f".<global>.{n}", value) for n, value in _globals(thing.__code__, thing.__globals__))
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                with suppress(ValueError):  # a name that the outer function has not bound yet
                    yield f".<closure>.{name}", cell.cell_contents
    elif isinstance(thing, CONTAINERS):
        entries: Iterable[tuple[Any, Any]] = thing.items() if isinstance(thing, dict) else enumerate(thing)
        if isinstance(thing, (set, frozenset)):  # sets of text have another order in every process
            entries = (("", value) for value in thing)
        if len(thing) < LONG:
            yield from ((f"[{_as_text(key)}]", value) for key, value in entries)
        else:
            flat = (part for entry in entries for part in (entry[1] if isinstance(entry[1], tuple) else (entry[1],)))
            texts = [_as_text(part) for part in flat if isinstance(part, _PLAIN)]
            texts = sorted(texts) if isinstance(thing, (set, frozenset)) else texts
            yield "[…]", hashlib.sha256("\n".join(texts).encode(errors="replace")).hexdigest()
    elif isinstance(thing, (*_WRAPPERS, MethodType, partial)):
        names = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset")
        yield from ((f".{name}", getattr(thing, name, None)) for name in names)
    else:
        yield ".class", type(thing)
        yield from ((f".{n}", held) for n, held in getattr(thing, "__dict__", {}).items() if n not in _LEFT_OUT)


def _as_text(part: object) -> str:
    """Return text for a plain value, a tensor or code, and the class name for any other object."""
    if isinstance(part, (str, PurePath)):
        return f"{part!r}{_of_file(part)}"
    if isinstance(part, Tensor):
        return tensor_hash(part)
    if isinstance(part, np.ndarray):
        return f"{part.dtype} {part.shape} {hashlib.sha256(part.tobytes()).hexdigest()}"
    if isinstance(part, CodeType):  # without the docstring, a function's first constant
        constants = [_as_text(constant) for constant in part.co_consts[not part.co_name.startswith("<") :]]
        return f"{part.co_code.hex()} {part.co_names} {constants}"
    return repr(part) if isinstance(part, _VALUES) else type(part).__qualname__


def _of_file(value: str | PurePath) -> str:
    """Return size and modification time of the file with this path as text, or an empty string if there is no file."""
    with suppress(OSError, ValueError):
        if (file := Path(value)).is_file():
            return f" {file.stat().st_size} {file.stat().st_mtime_ns}"
    return ""


def _is_installed(thing: Any) -> bool:
    """Return True for a class or function of an installed package, or an instance of a class of any of ``_HOSTS``."""
    is_named = isinstance(thing, (type, FunctionType, BuiltinFunctionType))
    top = str((thing if is_named else type(thing)).__module__).split(".")[0]
    if not is_named or top == "__main__":  # the user's script, also in a worker with another file
        return top in _HOSTS
    module = sys.modules.get(top)
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return top in {*_HOSTS, *sys.stdlib_module_names} or any(place.startswith(_INSTALLED) for place in places)


def _globals(code: CodeType, around: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of globals that code uses, also in nested functions, and of used attributes of modules."""
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
