"""Parts of a training that a claim rests on: open code, that is, code outside of closed packages (``texts.py``).

Such a part may remember anything, which is not visible from outside. So it is only named, never run, searched or
changed. A network's modules count as closed, because ``texts.py`` compares them between trainings.
"""

import gc
import inspect
import logging
import re
import signal
import sys
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from random import Random
from traceback import walk_stack
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.quasirandom import SobolEngine

from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, is_from, is_frozen
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.unlearning import texts
from avalanche_amnesia.unlearning.texts import CONTAINERS, FUNCTIONS, LEAVES, LONG, is_closed, is_installed, is_leaf

_UNCHANGED = (*FUNCTIONS, *CONTAINERS, ModuleType, CodeType, logging.Logger)  # code, or objects with caches
_DRAWING = (torch.Generator, SobolEngine, np.random.Generator, np.random.RandomState, Random, Iterator)
"""Closed classes whose objects have a state that no task's seed sets: random generators, iterators, open files."""
LEADING_OUT = {"origin_stream", "_origin_stream", "benchmark", "_benchmark"}
_PURE = "torch torchvision numpy avalanche avalanche_amnesia abc builtins cmath collections contextlib copy dataclasses"
_PURE += " enum functools itertools math numbers operator re string types typing warnings"
"""Packages whose functions depend on their arguments alone, except those whose names contain ``_IMPURE``."""
_IMPURE = r"load|save|file|open|mmap|read|write|bufsize|seed|rng|[Gg]enerator|RandomState|Sobol|attrgetter|methodcaller"
_IMPURE += "|^(id|input|hash|eval|exec|globals|locals|vars|setattr|delattr|__import__|seterr|set_(?!grad).*)$"
_PATCHABLE = r"(avalanche_amnesia|avalanche\.(benchmarks\.utils|training)|torchvision\.transforms|torch\.(nn|optim))\."
_PATCHABLE += r"|torch\.(autograd|random|_C\._nn|utils\.data\.)|math|(numpy\.)?random|time|builtins|copy|hashlib"
_PATCHABLE += "|itertools|functools|operator|os|warnings|logging"
_BOUND = (BuiltinFunctionType, MethodWrapperType)
_OF_ALL = [(of, n) for of in (nn.modules.module, torch_optimizer) for n in vars(of) if n.startswith("_global")]


def _is_pure(function: Any) -> bool:
    """Return True if the result of a closed function depends on its arguments alone: on no file, clock or setting."""
    package, name = str(function.__module__ or "torch").partition(".")[0].removeprefix("_"), function.__qualname__
    return package in _PURE.split() and not re.search(_IMPURE, name)


def open_parts(strategy: Strategy, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all open parts (user code) of the current training; ``options``: arguments of ``train``."""
    model, optimizer, data = strategy.model, strategy.optimizer, dict[int, Any]()
    users = [base for base in type(strategy).__mro__ if not is_closed(base)]
    found = [f"{name} of {base.__name__}" for base in users for name in vars(base) if name not in texts.NO_PARTS]
    plugins = [*strategy.plugins, *(p for of in ("metrics", "loggers") for p in getattr(strategy.evaluator, of, ()))]
    found += (_part_name(plugin) for plugin in plugins if not is_closed(type(plugin)))
    found += [*_open_in_plugins(strategy), *_open_in_modules(model)]
    found += [] if is_closed(type(optimizer)) else [f"the optimizer {_part_name(optimizer)}"]
    found += (f"{name} in the data" for name in open_in([strategy.experience], data))
    hooked = [*hooks_of(strategy), *((name, getattr(of, name)) for of, name in _OF_ALL)]
    weights = (*model.parameters(), *model.buffers(), optimizer.param_groups, optimizer.state)
    in_hooks = objects_in((hooks for _, hooks in hooked), (*weights, *model.modules(), strategy, optimizer))
    found += (f"{name} in the data, changed" for name in _changed_data([*data.values(), *in_hooks]))
    others = {"{} given to train": [options], "{} in the model or optimizer": weights}
    others |= {"{} around the training": interceptors(), "the loss {}": [strategy._criterion]}
    found += (words.format(name) for words, roots in others.items() for name in open_in(roots))
    found += (f"{place} ({name})" for place, hooks in hooked for name in open_in([hooks]))
    outside = (strategy, strategy.evaluator, optimizer, strategy._criterion, *model.modules(), sys.stdout, sys.stderr)
    inside = objects_in((part for part in plugins if not is_from(type(part), "avalanche_amnesia")), outside)
    found += map(_part_name, _of_users(reporting := [*plugins, *inside]))
    new = ((of, name, value) for of in (strategy, *reporting) for name, value in replaced_methods(of).items())
    found += (f"{n} of {type(of).__name__} ({part})" for of, n, value in new for part in open_in([value], {id(of): of}))
    found += (f"the kernel {name}" for name in _replaced_kernels(frozenset(getattr(torch.library, "_impls", ()))))
    met = [part for part in data.values() if not isinstance(part, LEAVES)]
    found += (f"{name} of {place} ({part})" for place, name, part, _ in patches(strategy, [*reporting, *met]))
    return tuple(dict.fromkeys(found))


def patches(strategy: Strategy, others: Iterable[Any] = ()) -> list[tuple[str, str, str, Any]]:
    """Return (place, name, replacement's name, replacement) of each attribute of closed code that users replaced."""
    own = (strategy, strategy.optimizer, strategy._criterion, *strategy.plugins, *strategy.model.modules())
    places, functions, cache = _places(tuple(dict.fromkeys(map(type, (*own, *others)))), len(sys.modules))
    held = ((at, [*of, *(v.__code__ for v in of if isinstance(v, FunctionType))]) for at, of in places.items())
    every = chain.from_iterable(_searched(place, objects, partial(_patches, place)) for place, objects in held)
    codes = map(attrgetter("__code__"), functions)
    return _searched("patches", chain(chain.from_iterable(places.values()), codes), lambda: every, cache)


_CACHE: dict[Any, Any] = {}


def _searched(key: Any, objects: Iterable[Any], search: Callable[[], Iterable[Any]], cache: Any = _CACHE) -> list[Any]:
    """Return ``search()``, cached under ``key`` until ``objects`` are others than at the last call."""
    now = np.fromiter(objects, dtype=object)
    before, found = cache.get(key, (now[:0], []))
    if now.tobytes() != before.tobytes():  # addresses: == of the objects may be a user's code
        cache[key] = now, found = now, [*search()]
    return found


@lru_cache(100)
def _places(kinds: tuple[type, ...], n_modules: int) -> tuple[Mapping[Any, Iterable[Any]], list[Any], dict[Any, Any]]:
    """Return (closed modules and classes, also bases of ``kinds``, → present values; all functions there; a cache)."""
    modules = [m for n, m in sorted(sys.modules.items()) if m and re.match(_PATCHABLE, n) and texts.is_closed_module(n)]
    inner = ("torch.utils.data.", "avalanche.benchmarks.utils.", "random")
    held = [v for m in modules for v in vars(m).values() if isinstance(v, type) and v.__module__.startswith(inner)]
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if is_closed(base))
    within = [sys.modules.get(kind.__module__, torch) for kind in bases if kind.__module__.startswith("torch.")]
    every: Iterable[Any] = (torch, nn.functional, Tensor, *within, *modules, *held, *bases)
    places = {each: vars(each).values() for each in every}
    return places, [*dict.fromkeys(v for of in places.values() for v in of if isinstance(v, FunctionType))], {}


def _patches(owner: type | ModuleType) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (place, name, replacement's name, replacement) of the replaced attributes of a closed class or module."""
    # Other modules than torch's import code of others: a patch there is a user's function or object.
    others = isinstance(owner, ModuleType) and not owner.__name__.startswith("torch")
    for name, value in [*vars(owner).items()]:
        imported = isinstance(value, ModuleType) or (isinstance(value, type) and is_installed(value))
        imported |= isinstance(value, BuiltinFunctionType) or not (callable(value) or hasattr(type(value), "__get__"))
        imported |= others and not isinstance(value, partial) and is_installed(value)
        if part := None if imported else next(open_in([value]), None):
            # A method that was only added (by transformers to nn.Module) has no effect on closed code.
            replaces = isinstance(owner, ModuleType) or any(hasattr(base, name) for base in owner.__bases__)
            source = f"def {name}("  # counts as replaced without a source to read
            with suppress(OSError, TypeError):
                source = inspect.getsource(owner)
            if replaces or re.search(rf"(def |\.){name}\b", source):
                yield owner.__name__, name, part, value


def objects_in(roots: Iterable[Any], outside: Iterable[Any] = ()) -> list[Any]:
    """Return ``roots`` and all objects inside closed ones, without those in ``outside``."""
    seen = {id(each): each for each in outside}
    n_outside = len(seen)
    deque(open_in(roots, seen), maxlen=0)
    return [*seen.values()][n_outside:]


def _of_users(objects: Iterable[Any]) -> list[Any]:
    """Return the functions and the objects of classes that no installed package defines."""
    return [each for each in objects if not is_installed(each if isinstance(each, FUNCTIONS) else type(each))]


@lru_cache(1)
def _replaced_kernels(names: frozenset[str]) -> list[str]:
    """Return the torch operators in ``names`` whose kernels user code has replaced; torch lists them only privately."""
    dump, found = getattr(torch._C, "_dispatch_dump", lambda operator: ""), []
    wanted = (name for name in sorted(names) if name[:5] == "aten/" and name[-5:] != "/Meta")  # computes shapes only
    for _, operator, key in (name.split("/") for name in wanted):
        places = re.findall(rf"^{key}: registered at (.*?):\d+ ", dump(f"aten::{operator}"), re.MULTILINE)
        if any(not place.startswith(texts.INSTALLED) or place == torch.library.__file__ for place in places):
            found.append(f"{operator} ({key})")
    return found


def interceptors() -> list[Any]:
    """Return modes and hooks of torch's operations, and users' callbacks (tracing, gc, imports, signals, logging …)."""
    # Only private functions of torch tell them: without these none is seen.
    functions = getattr(torch.overrides, "_get_current_function_mode_stack", tuple)
    operations = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", tuple)
    saved = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", bool)(True)
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    parts = (part for each in (logging.root, *loggers) for part in (*each.handlers, *each.filters))
    held: list[Any] = [*loggers, *parts, sys.stdout, sys.stderr]
    held += [value for each in held[len(loggers) :] for value in getattr(each, "__dict__", {}).values()]
    held += [each for value in held if type(value) is list for each in value]  # filters of handlers
    known = {threading.main_thread().ident, threading.get_ident()}
    held += [thread for thread in threading.enumerate() if thread.ident not in known]
    stacks = [walk_stack(frame) for thread, frame in sys._current_frames().items() if thread not in known]
    running = [(f.f_code, f.f_globals) for f, _ in chain(*stacks) if not f.f_code.co_filename.startswith(texts.FILES)]
    # A pool's thread keeps no function, but its code is running.
    held += [FunctionType(code, of, closure=tuple(CellType() for _ in code.co_freevars)) for code, of in running]
    held += [sys.gettrace(), sys.getprofile(), sys.unraisablehook, threading.excepthook, *gc.callbacks, *sys.meta_path]
    held += [*warnings.filters, *map(signal.getsignal, range(1, signal.NSIG))]
    users = _searched("callbacks", held, lambda: _of_users(objects_in(held)))
    return [*functions(), *operations(), saved, *users]


_SEEN: Any = torch.utils.weak.WeakIdKeyDictionary()  # part of the data → its texts at the first steps of trainings here


def _changed_data(parts: Iterable[Any]) -> Iterator[str]:
    """Yield names of tensors, data sets, closed transforms in ``parts`` that changed since their first use here."""
    wholes = [each._base if isinstance(each, Tensor) and each._base is not None else each for each in parts]
    for each in {id(whole): whole for whole in wholes if not isinstance(whole, _UNCHANGED)}.values():
        # Avalanche's fill caches, and keep modes.
        if is_from(type(each), "avalanche", "avalanche_amnesia") or not is_closed(type(each)):
            continue
        with suppress(TypeError):  # of an object without weak references
            now = [texts.excerpt(each, 2**30), *((n, texts.excerpt(v)) for n, v in texts.own_attributes(each))]
            (seen := _SEEN.setdefault(each, set())).add(str(now))
            if len(seen) > 1:
                yield _part_name(each)


def replaced_methods(obj: Any) -> dict[str, Any]:
    """Return name → value of the attributes of an object that replace its methods."""
    held = getattr(obj, "__dict__", {}).items()
    return {name: value for name, value in held if callable(value) and callable(getattr(type(obj), name, None))}


def _open_in_plugins(strategy: Strategy) -> Iterator[str]:
    """Yield names of plugins of Avalanche, and of users' functions that this package's plugins were given."""
    for plugin in strategy.plugins:
        package, name = type(plugin).__module__.partition(".")[0], type(plugin).__name__
        if package == "avalanche" and not isinstance(plugin, OF_THE_HOST):
            yield f"Avalanche's {name}"
        if package == "avalanche_amnesia":
            given = [v for v in vars(plugin).values() if not isinstance(v, (nn.Module, *CONTAINERS))]
            settings = [v for v in given if callable(v) or hasattr(v, "protected_share") or is_frozen(type(v))]
            yield from (f"{part} in {name}" for part in open_in(settings, {id(strategy): strategy}))


def _open_in_modules(model: nn.Module) -> Iterator[str]:
    """Yield the names of user subclasses of this package's models, and of attributes without a comparable value."""
    modules = [module for module in model.modules() if not is_from(type(module), "avalanche_amnesia")]
    # Attributes of the others change in every training, like those of their base classes.
    yield from (_part_name(m) for m in model.modules() if m not in modules and not is_closed(type(m)))
    users = dict.fromkeys(type(module) for module in modules if not is_closed(type(module)))
    held = [(type(module), item) for module in modules for item in texts.own_attributes(module)]
    held += [(user, item) for user in users for item in texts.values_read_by(user).items()]
    inside = {id(module) for module in model.modules()}
    for kind, (name, value) in held:
        compared = kind not in users or isinstance(value, texts.CALLED) or texts.is_plain(value) or id(value) in inside
        compared |= is_leaf(value) and texts.is_installed_module(getattr(value, "__name__", "torch"))
        # Any other object, such as an iterator or a distribution, may change without a trace in its text.
        keeps = not compared and (type(value).__module__ in sys.stdlib_module_names or not hasattr(value, "__name__"))
        if keeps or (isinstance(value, FUNCTIONS) and not _is_pure(value)) or any(True for _ in open_in([value])):
            yield f"{name} of {kind.__name__}"


def open_in(roots: Iterable[Any], seen: dict[int, Any] | None = None) -> Iterator[str]:
    """Yield names of open (user) functions and objects, and generators, in ``roots`` and closed objects inside them.

    All objects met are added to ``seen``, id → object; those already there are skipped.
    """
    seen, todo = {} if seen is None else seen, deque(roots)
    while todo:
        each = todo.popleft()
        is_known = id(each) in seen
        seen[id(each)] = each
        if is_known or is_leaf(each):
            continue
        if isinstance(each, (*LEAVES, *CONTAINERS)) and not is_closed(type(each)):  # a subclass of a script
            yield _part_name(each)
        if isinstance(each, np.ndarray):
            todo += each.ravel().tolist()
        elif isinstance(each, CONTAINERS):
            values = [*each, *(each.values() if isinstance(each, dict) else ())]
            values += [each.default_factory] if isinstance(each, defaultdict) else []
            kinds = set(map(type, values))
            if not all(map(texts.is_leaf_class, kinds)) or (Tensor in kinds and len(values) < LONG):  # quick for labels
                todo += values
        elif type(each).__module__ == "torch._ops" and not re.match("aten|prims|torchvision|amnesia", str(each)):
            yield f"the operator {each}"
        elif isinstance(each, (MethodType, *_BOUND, partial, *texts.WRAPPERS)):
            todo += (part for _, part in texts.parts_of(each))
            if isinstance(each, _BOUND) and isinstance(each.__self__, (Tensor, np.ndarray, *CONTAINERS)):
                yield f"{each.__name__} of {_part_name(each.__self__)}"
        elif isinstance(each, _DRAWING) or not is_closed(each if isinstance(each, FUNCTIONS) else type(each)):
            yield _part_name(each)
        elif isinstance(each, FunctionType):
            todo += (value for _, value in texts.closure_values(each))
        elif not isinstance(each, type):
            held = texts.attributes(each)
            seeds = type(each).__module__.startswith("avalanche_amnesia.")  # its own generators, from (seed, task)
            own = {id(v) for v in held.values() if seeds and isinstance(v, _DRAWING) and type(v) not in ProxyTypes}
            todo += [v for name, v in held.items() if name not in LEADING_OUT and id(v) not in own]
            todo += () if held else gc.get_referents(each)  # such as operator.methodcaller


def _part_name(obj: Any) -> str:
    """Return the name of an open part: class of an object, or name, file and line of a function."""
    if not isinstance(obj, FunctionType):
        kind = obj if isinstance(obj, type) else type(obj)
        return f"{kind.__module__}.{kind.__qualname__}"
    code = obj.__code__
    return f"{obj.__name__.strip('<>')} at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def hooks_of(strategy: Strategy) -> Iterator[tuple[str, list[Any]]]:
    """Yield path and hooks of model, parameters, optimizer and loss, and path and function of each replaced method."""
    model = strategy.model
    parts = [("optimizer", strategy.optimizer), ("criterion", strategy._criterion)]
    for path, part in (*parts, *model.named_modules(prefix="model"), *model.named_parameters(prefix="model")):
        held = [(name, hooks) for name, hooks in getattr(part, "__dict__", {}).items() if name.endswith("_hooks")]
        of_tensors = ("_backward_hooks", "_post_accumulate_grad_hooks") if isinstance(part, Tensor) else ()
        held += [(name, getattr(part, name)) for name in of_tensors]
        yield from ((f"{path}.{name}", [*hooks.values()]) for name, hooks in held if hooks and isinstance(hooks, dict))
        yield from ((f"{path}.{name}", [value]) for name, value in replaced_methods(part).items())
