"""Facts that affect a training but are no settings: hooks, replaced methods, tensor values and the user's code."""

import ast
import hashlib
import os
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import bit_sums, tensor_hash
from avalanche_amnesia.models.task_store import Parts
from avalanche_amnesia.object_walk import contents, is_foreign, reachable
from avalanche_amnesia.saving.strategy_settings import learning_settings
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.listening import listens
from avalanche_amnesia.training.host.rollback import is_ours, of_anybody
from avalanche_amnesia.unlearning.assumptions import hooks_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), PurePath, Enum, np.generic)
_VALUES = (*_PLAIN, torch.dtype, torch.device, torch.Size, Tensor, np.ndarray, CodeType)
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


def script_code(roots: Iterable[object], skip: Collection[object] = (), *, files: bool = False) -> dict[str, str]:
    """Return, by place, the code and plain values reachable from some objects, and hashes of their modules' texts.

    Attributes, containers, closures and the globals of functions are followed, and the user's classes with functions
    that a script put into classes of installed packages. Objects of Avalanche and of this package are entered, but
    their own values are in the saved state. ``files``: add size and time of the files that strings name.
    """
    found, counts, modules = dict[str, str](), Counter[str](), set[str]()
    labels = {id(thing): type(thing).__qualname__ for thing in skip}
    alive: list[object] = [*skip]  # so that no id is used twice
    todo = deque((f"[{at}]", root, True) for at, root in enumerate(roots))
    todo += [(f"[{at}].class", type(root), True) for at, root in enumerate(roots)]  # those of skipped roots, too
    while todo:
        place, thing, told = todo.popleft()
        if isinstance(thing, ModuleType) or is_foreign(type(thing)):
            continue
        if not isinstance(thing, _VALUES) and id(thing) not in labels:
            alive.append(thing)
            in_line = type(thing).__module__ == "builtins" and not isinstance(thing, (type, FunctionType))
            labels[id(thing)] = label = place if in_line else _label(thing, counts)
            if isinstance(thing, (type, FunctionType)) and not _is_installed(thing):
                modules.add(str(thing.__module__))  # None of methods that dataclasses make
            told_inside = told if in_line else isinstance(thing, type) or not _is_installed(thing)
            if isinstance(thing, (set, frozenset)):  # strings have another order in every process
                todo += ((f"{label}{at}", part, told) for at, part in _parts(thing) if not isinstance(part, _VALUES))
            elif of_anybody(thing):
                todo += ((f"{label}{at}", part, told_inside) for at, part in _parts(thing))
            if told and (isinstance(thing, (set, frozenset)) or not of_anybody(thing)):
                found[f"{label}[:]"] = _of_samples(thing, files)
        if told:
            text = _as_text(thing) if isinstance(thing, _VALUES) else labels[id(thing)]
            found[place] = text + (_of_file(thing) if files else "")
    return {**found, "texts": " ".join(texts_of(modules))}


def _label(thing: Any, counts: Counter[str]) -> str:
    """Return the name of a class, a function or of an object's class, with a number from the second one on."""
    name = f"class {thing.__qualname__}" if isinstance(thing, type) else getattr(thing, "__qualname__", "")
    name = name or type(thing).__qualname__
    counts[name] += 1
    return name if counts[name] == 1 else f"{name} {counts[name]}"


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a function, class or instance with their places in it."""
    if isinstance(thing, type) and _is_installed(thing):
        added = ((name, value) for base in thing.__mro__ for name, value in vars(base).items())
        yield from ((f".{name}", v) for name, v in added if isinstance(v, FunctionType) and not _is_installed(v))
    elif isinstance(thing, type):
        yield from ((f".base[{at}]", base) for at, base in enumerate(thing.__bases__))
        yield from ((f".{name}", value) for name, value in vars(thing).items() if name not in _OF_EVERY_CLASS)
    elif isinstance(thing, FunctionType):
        yield from () if _is_installed(thing) else ((".code", thing.__code__), *held(thing))
    elif isinstance(thing, _WRAPPERS):
        yield from ((f".{name}", getattr(thing, name, None)) for name in ("__func__", "func", "fget", "fset"))
    else:
        yield from ((".class", type(thing)), *held(thing))


def _as_text(part: object) -> str:
    """Return text for a plain value, and a hash for a tensor, an array or code."""
    if isinstance(part, Tensor):
        return tensor_hash(part)
    if isinstance(part, np.ndarray):
        return f"{part.dtype} {part.shape} {hashlib.sha256(part.tobytes()).hexdigest()}"
    if isinstance(part, CodeType):  # without the docstring, a function's first constant
        constants = [_as_text(constant) for constant in part.co_consts[not part.co_name.startswith("<") :]]
        return f"{part.co_code.hex()} {part.co_names} {constants}"
    return repr(part)


def _of_file(value: Any) -> str:
    """Return size and time of the file that a string or path names, or nothing."""
    if not isinstance(value, (str, PurePath)) or "\n" in str(value) or not ({"/", "."} & set(str(value))):
        return ""
    with suppress(OSError, ValueError):
        status = os.stat(value)
        return f" {status.st_size} {status.st_mtime_ns}"
    return ""


def _of_samples(container: Any, files: bool) -> str:
    """Return a hash of the plain values in a long container and in its items, and of the files that they name."""
    values = container.items() if isinstance(container, dict) else container
    flat = [part for item in values for part in (item if isinstance(item, tuple) else (item,))]
    plain = [f"{part!r}{_of_file(part) if files else ''}" for part in flat if isinstance(part, _PLAIN)]
    plain = sorted(plain) if isinstance(container, (set, frozenset)) else plain
    return hashlib.sha256("\n".join(plain).encode()).hexdigest()


# Texts of modules ------------------------------------------------------------------------------------------------

TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {}
"""Module → hash of its text, and the modules that it imports; read once, because the loaded code does not change."""


def texts_of(modules: Iterable[str]) -> list[str]:
    """Return hashes of the texts of the user's modules, and of all modules of theirs that they import."""
    todo, found = list(modules), dict[str, str]()
    while todo:
        name = todo.pop()
        if name not in found:
            if name not in TEXTS:
                TEXTS[name] = _read(name)
            found[name], imported = TEXTS[name]
            todo += imported
    return sorted({digest for digest in found.values() if digest})


def _read(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the hash of a module's text, and the names in its import statements; nothing if it is installed."""
    parent = name.rpartition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None)
    with suppress(ImportError, ValueError, AttributeError):
        if file is None and name not in sys.modules and (not parent or parent in sys.modules):
            file = getattr(find_spec(name), "origin", None)
    if not str(file).endswith(".py") or str(file).startswith(_INSTALLED) or name.partition(".")[0] in _HOSTS:
        return "", ()
    text = Path(str(file)).read_bytes()
    imported: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name if str(file).endswith("__init__.py") else parent
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            imported += (base, *(f"{base}.{alias.name}" for alias in node.names))
    names = (".".join(one.split(".")[:n]) for one in imported for n in range(1, one.count(".") + 2))
    return hashlib.sha256(text).hexdigest(), tuple(dict.fromkeys(names))


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
