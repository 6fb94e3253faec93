"""Collect facts that affect a training but are no settings: hooks, replaced methods, tensors and the user's code."""

import copyreg
import dis
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import PurePath
from random import Random
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.saving.strategy_settings import learning_settings
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import listens
from avalanche_amnesia.unlearning import assumptions, texts

_HOSTS = frozenset({__name__.split(".")[0], "avalanche", "wandb"})
"""Packages whose objects are not followed: strategies, streams and loggers are covered by the state and the data."""
_LEAVES = (*texts.LEAVES, torch.fx.Graph, torch.fx.Node)  # a graph's code says what it computes
_LEFT_OUT = assumptions.LEADING_OUT | {"training", *(name for name in vars(torch.nn.Module()) if "_hooks" in name)}
"""Attributes not followed: a module's mode, which evaluations change, and its hooks, whose keys count all hooks."""

_NAMED = r"LOAD_CONST (\w+)\n(?:LOAD_CONST .*\n)?(?:PRECALL|CALL|BINARY_SUBSCR) "
_READS = re.compile(rf" (?:environ|getenv)\n(?:\w+ get\n)?(?:{_NAMED})?")
"""Instructions that read a variable of the environment, and its name, if that is a constant."""


def facts_of(strategy: Strategy) -> dict[str, Any]:
    """Return, by name, all values of a strategy (tensors as hashes) that only ``train`` and ``unlearn`` may change."""
    model, optimizer = strategy.model, strategy.optimizer
    tensors: dict[str, Tensor] = dict(model.state_dict())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts: dict[str, Any] = {f"{name}.requires_grad": p.requires_grad for name, p in model.named_parameters()}
    for at, group in enumerate(optimizer.param_groups):
        place = f"optimizer.param_groups[{at}]"
        facts |= {f"{place}.{name}": texts.as_text(v) for name, v in group.items() if name != "params"}
        facts[f"{place}.params"] = [names.get(id(parameter), "another") for parameter in group["params"]]
    for parameter, moments in optimizer.state.items():
        place = f"optimizer.state of {names.get(id(parameter), 'another')}"
        for name, value in moments.items():
            (tensors if isinstance(value, Tensor) else facts)[f"{place}: {name}"] = value
    facts |= {f"{of}.{name}": repr(v) for of, own in learning_settings(strategy).items() for name, v in own.items()}
    scripts = [plugin for plugin in strategy.plugins if _is_script_plugin(plugin)]
    held = ((f"{type(plugin).__name__}.{name}", value) for plugin in scripts for name, value in vars(plugin).items())
    facts |= {place: repr(value) for place, value in held if isinstance(value, (int, float, str)) or callable(value)}
    for path, of in texts.attributes_of(strategy).items():
        facts |= {f"{path}.{name}": value for name, value in of.items()}
    facts |= state_hashes(tensors)
    facts |= {name: [id(hook) for hook in hooks] for name, hooks in assumptions.hooks_of(strategy)}
    return {name: fact for name, fact in facts.items() if not name.endswith(".training")}  # evaluations change it


def _is_script_plugin(plugin: Any) -> bool:
    """Return True if a plugin is the user's own and listens to no evaluation event, so evaluations cannot change it."""
    evaluates = any("_eval" in event and listens(plugin, event) for event in dir(plugin))
    return not evaluates and not type(plugin).__module__.startswith("avalanche")


def script_code(roots: Iterable[object], skip: Iterable[object] = (), *, files: bool = True) -> list[str]:
    """Return the user's code and plain values reachable from ``roots`` as sorted lines of text, to hash or compare.

    Functions and classes of the script count with the values in their closures, defaults and globals. Containers and
    attributes are followed; an object met before is only named. Values are numbers, text (``files``: with size and time
    of a file that it names) and tensors; state and data cover those in objects of this package and of Avalanche.
    """
    lines: set[str] = set()
    names = {id(obj): type(obj).__qualname__ for obj in skip}
    known: list[Any] = [*skip]  # keeps the objects alive, so that no id is used twice
    numbers = Counter[str]()
    todo: deque[tuple[str, Any, bool]] = deque((f"[{at}]", obj, True) for at, obj in enumerate(roots))
    while todo:
        place, obj, told = todo.popleft()
        if not isinstance(obj, _LEAVES) and id(obj) not in names:
            known.append(obj)
            inside = isinstance(obj, texts.CONTAINERS)
            kind = f"{getattr(obj, '__module__', '')}.{getattr(obj, '__qualname__', type(obj).__qualname__)}"
            numbers[kind] += not inside
            names[id(obj)] = name = place if inside else f"{kind} {numbers[kind]}".removesuffix(" 1")
            tells = told if inside else isinstance(obj, texts.CALLED) or not _is_installed(obj)
            todo += ((f"{name}{at}", part, tells) for at, part in _parts(obj, files=files))
        elif isinstance(obj, (Tensor, np.ndarray)):
            todo += ((f"{place}{at}", part, told) for at, part in _attributes(obj))
        if told:
            text = names[id(obj)] if id(obj) in names else texts.as_text(obj)
            names_file = files and isinstance(obj, (str, PurePath))
            lines.add(f"{place} {text}{texts.hash_with_files([str(obj)]) if names_file else ''}")
    return sorted(lines)


def _parts(obj: Any, *, files: bool) -> Iterator[tuple[str, Any]]:
    """Yield pairs (path, value), such as path ``.code``, for the parts of a function, class, container or object."""
    if isinstance(obj, (type, FunctionType)) and _is_installed(obj):
        patches = (value for value in vars(obj).items() if isinstance(value[1], FunctionType))
        yield from ((f".{name}", value) for name, value in patches if not _is_installed(value))
        if obj is os.getenv:
            yield ".environ", dict(sorted(os.environ.items()))
    elif isinstance(obj, (*texts.CALLED, *texts.WRAPPERS)):
        found = [*texts.parts_of(obj)]
        for at, part in found:  # under another name, its reads are not recognised: then all variables count
            is_named = at.endswith((".environ", ".getenv")) and (part is os.environ or part is os.getenv)
            yield at, _environment_variables(obj) if is_named else part
        if any(part is by_name for _, part in found for by_name in (eval, exec, globals)):  # it may read any of them
            yield ".globals", {name: texts.as_text(v) for name, v in getattr(obj, "__globals__", {}).items()}
        yield ".code", getattr(obj, "__code__", None)
    elif isinstance(obj, texts.CONTAINERS):
        yield from _attributes(obj)
        items: Iterable[Any] = obj.items() if isinstance(obj, dict) else obj
        if len(obj) >= texts.LONG:
            with suppress(ValueError):  # of entries that are no plain values or arrays
                yield "[…]", texts.hash_with_files(obj, sys.maxsize)
                return
        # Sets of text have another order in every process.
        yield from (("[]" if isinstance(obj, (set, frozenset)) else f"[{at}]", v) for at, v in enumerate(items))
    else:
        yield ".class", type(obj)
        yield from _attributes(obj)
        if isinstance(obj, GeneratorType) and obj.gi_frame:
            yield ".frame", [obj.gi_code, obj.gi_frame.f_lasti, obj.gi_frame.f_locals, obj.gi_yieldfrom]
        # Such as re.Pattern.
        if texts.is_installed(type(obj)) and (isinstance(obj, Random) or not texts.attributes(obj)):
            with suppress(Exception):  # of objects that can't be pickled
                yield ".state", copyreg.dispatch_table.get(type(obj), lambda it: it.__reduce_ex__(2))(obj)


def _environment_variables(function: Any) -> dict[str, Any]:
    """Return environment variables whose names are literals in a function's code; all, if a name is not a literal."""
    codes = [function.__code__] if isinstance(function, FunctionType) else []
    for code in codes:
        codes += [nested for nested in code.co_consts if isinstance(nested, CodeType)]
    steps = [f"{step.opname} {step.argval}\n" for code in codes for step in dis.get_instructions(code)]
    names = _READS.findall("".join(steps))
    return {name: os.environ.get(name) for name in names if all(names)} or dict(sorted(os.environ.items()))


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    for name, held in texts.attributes(obj).items():
        if name not in _LEFT_OUT or (name in assumptions.LEADING_OUT and not _is_installed(held)):
            yield f".{name}", held


def _is_installed(obj: Any) -> bool:
    """Return True for installed classes and functions, and for any object of this package, Avalanche or W&B."""
    is_named = isinstance(obj, (type, FunctionType, BuiltinFunctionType))
    module = str((obj if is_named else type(obj)).__module__)
    return module.split(".")[0] in _HOSTS or (is_named and texts.is_installed(obj))
