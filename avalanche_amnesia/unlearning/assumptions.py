"""Parts of a training that a claim rests on: code outside of torch, torchvision, Avalanche and this package.

Such an open part may remember anything, which is not visible from outside. So it is only named, never run, searched
or changed: only objects of closed classes (of these packages) are searched. A network's modules count as closed,
because their tensors, plain attributes, arrays and functions are compared between trainings (:func:`attributes_of`),
and so is what the code of their classes reads elsewhere, such as global variables (:func:`_values_read_by`).
"""

import dis
import gc
import inspect
import logging
import marshal
import os
import re
import signal
import sys
import sysconfig
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import chain
from operator import attrgetter
from pathlib import PurePath
from random import Random
from traceback import walk_stack
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch
from avalanche.training.templates import SupervisedTemplate
from blake3 import blake3
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.quasirandom import SobolEngine

from avalanche_amnesia.bits import sums_of_bits, tensor_hash
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, is_from, is_frozen
from avalanche_amnesia.strategy import Strategy

_CLOSED = {"avalanche_amnesia", "avalanche", "torch", "torchvision", "numpy", "PIL", "pybind11_builtins"}
_CLOSED |= {"typing_extensions", *sys.stdlib_module_names}
_INSTALLED = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
_PATHS = [path for name in _CLOSED for path in getattr(sys.modules.get(name), "__path__", ())]
_FILES = (os.path.dirname(os.__file__), "<frozen ", *_INSTALLED, *_PATHS)
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, complex, str, bytes, range, Enum, PurePath, type(None), type(...), *_OF_TORCH)
LEAVES = (*_PLAIN, Tensor, np.ndarray, np.generic, ModuleType, CodeType, logging.Logger)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
CALLED = (*_FUNCTIONS, MethodType, MethodWrapperType, partial)
CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_UNCHANGED = (*_FUNCTIONS, *CONTAINERS, ModuleType, CodeType, logging.Logger)
"""Classes of objects that are no settings of data: code, which is read elsewhere, and objects with caches."""
_DRAWING = (torch.Generator, SobolEngine, np.random.Generator, np.random.RandomState, Random, Iterator)
"""Closed classes whose objects have a state that no task's seed sets: random generators, iterators, open files."""
LONG = 1000  # longer containers hold samples
LEADING_OUT = {"origin_stream", "_origin_stream", "benchmark", "_benchmark"}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WRITTEN = "annotations dict weakref qualname firstlineno static_attributes parameters slotnames orig_bases"
_OF_EVERY_CLASS = {
    *vars(type("", (SupervisedTemplate,), {})),
    "_abc_impl",
    *(f"__{name}__" for name in _WRITTEN.split()),
}
_NO_PARTS = {*_OF_EVERY_CLASS, "__init__"}
_PURE = "torch torchvision numpy avalanche avalanche_amnesia abc builtins cmath collections contextlib copy dataclasses"
_PURE += " enum functools itertools math numbers operator re string types typing warnings"
"""Packages whose functions depend on their arguments alone, except those whose names contain ``_IMPURE``."""
_IMPURE = re.compile(r"load|save|file|open|mmap|read|write|bufsize|seed|rng|[Gg]enerator|RandomState|Sobol|attrgetter")
_READING = {f.__name__: f for f in (open, id, hash, eval, exec, globals, locals, vars, setattr, delattr, __import__)}
_CACHE = type(lru_cache(open))
WRAPPERS = (staticmethod, classmethod, property, cached_property, _CACHE)
_SETTINGS = "get_default_dtype get_default_device get_num_threads get_float32_matmul_precision _C._get_mkldnn_enabled"
_SETTINGS += " are_deterministic_algorithms_enabled backends.mha.get_fastpath_enabled backends.cuda.flash_sdp_enabled"
_SETTINGS += " backends.cuda.math_sdp_enabled backends.cuda.matmul.fp32_precision backends.cudnn.benchmark"
_SETTINGS += " backends.cudnn.deterministic backends.cudnn.conv.fp32_precision"
_PATCHABLE = re.compile(
    r"(torch\.(nn|optim|utils\.data)|torchvision\.transforms|avalanche\.(benchmarks\.utils|training)|avalanche_amnesia)\."
    r"|torch\.(autograd|random|_C\._nn)|math|(numpy\.)?random|time|builtins|copy|hashlib|itertools|functools|operator|os"
    r"|warnings|logging"
)
_OPERATORS = ("aten", "prims", "torchvision", "amnesia")  # namespaces of closed ones
_OF_ALL = [(of, n) for of in (nn.modules.module, torch_optimizer) for n in vars(of) if n.startswith("_global")]
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def is_closed(obj: Any) -> bool:
    """Return True if a class or function is defined in a closed package: torch, Avalanche, numpy, Python's library …"""
    return all(map(_is_closed, _modules_of(obj)))


def _modules_of(obj: Any) -> tuple[str, ...]:
    """Return names of modules: the stated one of a class, function or object; of a function also that of its code."""
    own = str(getattr(obj, "__module__", None))  # functools.wraps copies it from the function that it replaces
    if not isinstance(obj, FunctionType):
        return (own,)
    inside, file = obj.__globals__, obj.__code__.co_filename
    # Data classes generate methods from text, torch.fx functions without a module. Others run in their module: code may
    # be compiled in the name of any file. Some modules replace themselves by an object, which then says nothing.
    module = sys.modules.get(getattr(inside.get("__spec__"), "name", "__main__"))
    is_known = file.startswith(_FILES) or (file == "<string>" and obj.__name__[:2] == "__")
    is_known &= type(module) is not ModuleType or vars(module) is inside
    return own, str(inside.get("__name__")) if is_known or file.startswith("<eval_with_key>") else "__main__"


@lru_cache(None)
def _is_closed(module: str) -> bool:
    """Return True for a module of a closed package, unless a script has hidden a standard module by one of its own."""
    package = module.partition(".")[0].replace("None", "builtins")
    file = getattr(sys.modules.get(package), "__file__", None) or _FILES[0]
    return package in _CLOSED and file.startswith(_FILES)


def _is_pure(function: Any) -> bool:
    """Return True if the result of a closed function depends on its arguments alone: on no file, clock or setting."""
    package = str(function.__module__ or "torch").partition(".")[0].removeprefix("_")
    return package in _PURE.split() and function not in _READING.values() and not _IMPURE.search(function.__qualname__)


def is_installed(obj: Any) -> bool:
    """Return True if a class or function is defined in an installed package, also in Python's library."""
    return all(map(_is_installed, _modules_of(obj)))


@lru_cache(None)
def _is_installed(module: str) -> bool:
    package = sys.modules.get(module.partition(".")[0])
    places = [getattr(package, "__file__", None) or "", *getattr(package, "__path__", ())]
    return module != "__main__" and (_is_closed(module) or any(place.startswith(_INSTALLED) for place in places))


def open_parts(strategy: Strategy, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all open parts (user code) of the current training; ``options``: arguments of ``train``."""
    model, optimizer, data = strategy.model, strategy.optimizer, dict[int, Any]()
    users = [base for base in type(strategy).__mro__ if not is_closed(base)]
    found = [f"{name} of {base.__name__}" for base in users for name in vars(base) if name not in _NO_PARTS]
    plugins = [*strategy.plugins, *(p for of in ("metrics", "loggers") for p in getattr(strategy.evaluator, of, ()))]
    found += (_part_name(plugin) for plugin in plugins if not is_closed(type(plugin)))
    found += [*_open_in_plugins(strategy), *_open_in_modules(model)]
    found += [] if is_closed(type(optimizer)) else [f"the optimizer {_part_name(optimizer)}"]
    found += (f"the loss {name}" for name in open_in([strategy._criterion]))
    found += (f"{name} in the data" for name in open_in([strategy.experience], data))
    found += (f"{name} in the data, changed" for name in _changed_data(data.values()))
    found += (f"{name} given to train" for name in open_in([options]))
    weights = (*model.parameters(), *model.buffers(), optimizer.param_groups, optimizer.state)
    found += (f"{name} in the model or optimizer" for name in open_in(weights))
    found += (f"{name} around the training" for name in open_in(interceptors()))
    hooked = [*hooks_of(strategy), *((name, getattr(of, name)) for of, name in _OF_ALL)]
    found += (f"{place} ({name})" for place, hooks in hooked for name in open_in([hooks]))
    outside = (strategy, strategy.evaluator, optimizer, strategy._criterion, *model.modules(), sys.stdout, sys.stderr)
    inside = objects_in((part for part in plugins if not is_from(type(part), "avalanche_amnesia")), outside)
    found += map(_part_name, _of_users(reporting := [*plugins, *inside]))
    new = ((of, name, value) for of in (strategy, *reporting) for name, value in replaced_methods(of).items())
    found += (f"{n} of {type(of).__name__} ({part})" for of, n, value in new for part in open_in([value], {id(of): of}))
    of_python = getattr(torch.library, "_impls", ())
    found += (f"the kernel {name}" for name in _searched("kernels", of_python, partial(_replaced_kernels, of_python)))
    met = [part for part in data.values() if not isinstance(part, LEAVES)]
    found += (f"{name} of {place} ({part})" for place, name, part, _ in patches(strategy, [*reporting, *met]))
    return tuple(dict.fromkeys(found))


def patches(strategy: Strategy, others: Iterable[Any] = ()) -> list[tuple[str, str, str, Any]]:
    """Return (place, name, replacement's name, replacement) of each attribute of closed code that users replaced."""
    own = (strategy, strategy.optimizer, strategy._criterion, *strategy.plugins, *strategy.model.modules())
    places, functions = _places(tuple(dict.fromkeys(map(type, (*own, *others)))), len(sys.modules))
    held = ((at, [*of, *(v.__code__ for v in of if isinstance(v, FunctionType))]) for at, of in places.items())
    every = chain.from_iterable(_searched(place, objects, partial(_patches, place)) for place, objects in held)
    codes = map(attrgetter("__code__"), functions)
    return _searched("patches", chain((places,), chain.from_iterable(places.values()), codes), lambda: every)


_SEARCHED: dict[Any, tuple[Any, list[Any]]] = {}


def _searched(place: Any, objects: Iterable[Any], search: Callable[[], Iterable[Any]]) -> list[Any]:
    """Return ``search()`` for ``place``, cached until ``objects`` are others than at the last call."""
    now = np.fromiter(objects, dtype=object)
    before, found = _SEARCHED.get(place, (now[:0], []))
    if now.tobytes() != before.tobytes():  # addresses: == of the objects may be a user's code
        _SEARCHED[place] = now, found = now, [*search()]
    return found


@lru_cache(100)
def _places(kinds: tuple[type, ...], n_modules: int) -> tuple[Mapping[Any, Iterable[Any]], list[Any]]:
    """Return closed modules and classes, also bases of ``kinds``, → their present values, and all functions there."""
    modules = [m for name, m in sorted(sys.modules.items()) if m and _PATCHABLE.match(name) and _is_closed(name)]
    inner = ("torch.utils.data.", "avalanche.benchmarks.utils.", "random")
    held = [v for m in modules for v in vars(m).values() if isinstance(v, type) and v.__module__.startswith(inner)]
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if is_closed(base))
    within = [sys.modules.get(kind.__module__, torch) for kind in bases if kind.__module__.startswith("torch.")]
    every: Iterable[Any] = (torch, nn.functional, Tensor, *within, *modules, *held, *bases)
    places = {each: vars(each).values() for each in every}
    return places, [value for values in places.values() for value in values if isinstance(value, FunctionType)]


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
            if replaces or f"def {name}(" in source:
                yield owner.__name__, name, part, value


def objects_in(roots: Iterable[Any], outside: Iterable[Any] = ()) -> list[Any]:
    """Return ``roots`` and all objects inside closed ones, without those in ``outside``."""
    seen = {id(each): each for each in outside}
    n_outside = len(seen)
    deque(open_in(roots, seen), maxlen=0)
    return [*seen.values()][n_outside:]


def _of_users(objects: Iterable[Any]) -> list[Any]:
    """Return the functions and the objects of classes that no installed package defines."""
    return [each for each in objects if not is_installed(each if isinstance(each, _FUNCTIONS) else type(each))]


def _replaced_kernels(names: Iterable[str]) -> list[str]:
    """Return the torch operators in ``names`` whose kernels user code has replaced; torch lists them only privately."""
    dump, found = getattr(torch._C, "_dispatch_dump", lambda operator: ""), []
    for _, operator, key in (name.split("/") for name in sorted(names) if name.startswith("aten/")):
        if key == "Meta":  # computes shapes only
            continue
        places = re.findall(rf"^{key}: registered at (.*?):\d+ ", dump(f"aten::{operator}"), re.MULTILINE)
        if any(not place.startswith(_INSTALLED) or place == torch.library.__file__ for place in places):
            found.append(f"{operator} ({key})")
    return found


def interceptors() -> list[Any]:
    """Return the modes and hooks of torch's operations, and the user's callbacks that Python may run at any time."""
    # Only private functions of torch tell them: without these none is seen.
    functions = getattr(torch.overrides, "_get_current_function_mode_stack", tuple)
    operations = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", tuple)
    saved = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", bool)(True)
    callbacks = _callbacks()
    users = _searched("callbacks", callbacks, lambda: _of_users(objects_in(callbacks)))
    return [*functions(), *operations(), saved, *users]


def _callbacks() -> list[Any]:
    """Return callbacks of tracing, profiling, gc, imports, signals, errors, warnings and logging, threads, outputs."""
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    parts = chain.from_iterable(map(attrgetter("handlers", "filters"), (logging.root, *loggers)))
    held = [*loggers, *chain.from_iterable(parts), sys.stdout, sys.stderr]
    held += [value for each in held[len(loggers) :] for value in getattr(each, "__dict__", {}).values()]
    held += [each for value in held if type(value) is list for each in value]  # filters of handlers
    known = {threading.main_thread().ident, threading.get_ident()}
    held += [thread for thread in threading.enumerate() if thread.ident not in known]
    stacks = [walk_stack(frame) for thread, frame in sys._current_frames().items() if thread not in known]
    running = [(f.f_code, f.f_globals) for f, _ in chain(*stacks) if not f.f_code.co_filename.startswith(_FILES)]
    # A pool's thread keeps no function, but its code is running.
    held += [FunctionType(code, of, closure=tuple(CellType() for _ in code.co_freevars)) for code, of in running]
    held += [sys.gettrace(), sys.getprofile(), *gc.callbacks, *sys.meta_path]
    held += [sys.unraisablehook, threading.excepthook, *warnings.filters]
    return [*held, *map(signal.getsignal, range(1, signal.NSIG))]


_SEEN: Any = torch.utils.weak.WeakIdKeyDictionary()  # part of the data → its texts at the first steps of trainings here


def _changed_data(parts: Iterable[Any]) -> Iterator[str]:
    """Yield names of tensors, data sets, closed transforms in ``parts`` that changed since their first use here."""
    wholes = [each._base if isinstance(each, Tensor) and each._base is not None else each for each in parts]
    for each in {id(whole): whole for whole in wholes if not isinstance(whole, _UNCHANGED)}.values():
        # Avalanche's fill caches, and keep modes.
        if is_from(type(each), "avalanche", "avalanche_amnesia") or not is_closed(type(each)):
            continue
        with suppress(TypeError):  # of an object without weak references
            texts = _SEEN.setdefault(each, set())
            texts.add(str([_excerpt(each, 2**30), *((name, _excerpt(value)) for name, value in _attributes(each))]))
            if len(texts) > 1:
                yield _part_name(each)


def _excerpt(value: Any, nbytes: int = 0) -> str:
    """Return text that most changes of data change; of tensors and arrays over ``nbytes``, it reads some entries."""
    if isinstance(value, (Tensor, np.ndarray)):
        flat = value.detach().reshape(-1) if isinstance(value, Tensor) else value.reshape(-1)
        # torch counts changes in place, except those through .data or NumPy
        version = value._version if isinstance(value, Tensor) and not value.is_inference() else ""
        some = flat if value.nbytes <= nbytes and value.dtype != object else flat[:: len(flat) // LONG + 1]
        return f"{version} {sums_of_bits(some).hex() if isinstance(some, Tensor) else as_text(some)}"
    if isinstance(value, CONTAINERS):
        with suppress(ValueError):  # of entries that are no plain values or arrays
            return hash_with_files(value)
        entries = [*(value.values() if isinstance(value, dict) else value)]
        return str([*map(_excerpt, entries[:: len(entries) // LONG + 1])])
    return as_text(value) if _is_plain(value) else f"{type(value).__qualname__} {id(value)}"


def hash_with_files(values: Any, most: int = 10_000) -> str:
    """Return a hash of plain values, and size and time of ``most`` files they name; raise ValueError for others."""
    texts = [t for each in values for t in (each if isinstance(each, (tuple, list)) else (each,)) if isinstance(t, str)]
    files = [os.stat(text) for text in texts[:: len(texts) // most + 1] if os.path.isfile(text)]
    return blake3(marshal.dumps([values, [(file.st_size, file.st_mtime_ns) for file in files]], 2)).hexdigest()


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
    held = [(type(module), item) for module in modules for item in _attributes(module)]
    held += [(user, item) for user in users for item in _values_read_by(user).items()]
    inside = {id(module) for module in model.modules()}
    for kind, (name, value) in [(kind, item) for kind, item in held if not _is_leaf(item[1])]:
        compared = isinstance(value, CALLED) or _is_plain(value) or id(value) in inside
        # Any other object, such as an iterator or a distribution, may change without a trace in its text.
        keeps = type(value).__module__ in sys.stdlib_module_names or not hasattr(value, "__name__")  # of a function
        keeps = keeps and not compared and kind in users
        keeps |= isinstance(value, _FUNCTIONS) and not _is_pure(value)
        if keeps or any(True for _ in open_in([value])):
            yield f"{name} of {kind.__name__}"


def open_in(roots: Iterable[Any], seen: dict[int, Any] | None = None) -> Iterator[str]:
    """Yield names of open (user) functions and objects, and generators, in ``roots`` and closed objects inside them.

    All objects met are added to ``seen``, id → object; those already there are skipped.
    """
    seen, todo = {} if seen is None else seen, deque(roots)
    while todo:
        each = todo.popleft()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if _is_leaf(each):
            continue
        if isinstance(each, (*LEAVES, *CONTAINERS)) and not is_closed(type(each)):  # a subclass of a script
            yield _part_name(each)
        if isinstance(each, np.ndarray):
            todo += each.ravel().tolist()
        elif isinstance(each, CONTAINERS):
            values = [*each, *(each.values() if isinstance(each, dict) else ())]
            values += [each.default_factory] if isinstance(each, defaultdict) else []
            kinds = set(map(type, values))
            if not all(map(_is_leaf_class, kinds)) or (Tensor in kinds and len(values) < LONG):  # quick for labels
                todo += values
        elif type(each).__module__ == "torch._ops" and not str(each).startswith(_OPERATORS):
            yield f"the operator {each}"
        elif isinstance(each, (MethodType, BuiltinFunctionType, MethodWrapperType, partial, *WRAPPERS)):
            todo += (part for _, part in parts_of(each))
        elif isinstance(each, _DRAWING) or not is_closed(each if isinstance(each, _FUNCTIONS) else type(each)):
            yield _part_name(each)
        elif isinstance(each, FunctionType):
            todo += (value for _, value in _closure_values(each))
        elif not isinstance(each, type):
            held = attributes(each)
            seeds = type(each).__module__.startswith("avalanche_amnesia.")  # its own generators, from (seed, task)
            own = {id(v) for v in held.values() if seeds and isinstance(v, _DRAWING) and type(v) not in ProxyTypes}
            todo += [v for name, v in held.items() if name not in LEADING_OUT and id(v) not in own]
            todo += () if held else gc.get_referents(each)  # such as operator.methodcaller


def _is_leaf(value: Any) -> bool:
    """Return True for a plain value, tensor, array, module or code of a closed class, without objects inside."""
    return _is_leaf_class(type(value)) and not (isinstance(value, np.ndarray) and value.dtype.hasobject)


_is_leaf_class: Any = lru_cache(10_000)(lambda kind: issubclass(kind, LEAVES) and is_closed(kind))


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
        held += [(name, getattr(part, name)) for name in _HOOKS_OF_PARAMETERS if isinstance(part, Tensor)]
        yield from ((f"{path}.{name}", [*hooks.values()]) for name, hooks in held if hooks and isinstance(hooks, dict))
        yield from ((f"{path}.{name}", [value]) for name, value in replaced_methods(part).items())


Attributes = dict[str, dict[str, str]]
"""Path of a module or of the loss → attribute → value as text; tensors as hashes."""


def attributes_of(strategy: Strategy) -> Attributes:
    """Return path → attribute → value as text, for the network's modules, their code, the loss, and torch itself."""
    criterion: Any = strategy._criterion
    criterion = criterion.__self__ if isinstance(criterion, MethodType) else criterion
    modules = list(criterion.named_modules(prefix="criterion")) if isinstance(criterion, nn.Module) else []
    found: Attributes = {}
    for kind in dict.fromkeys(map(type, strategy.model.modules())):
        found[f"code of {kind.__name__}"] = {name: as_text(value) for name, value in _values_read_by(kind).items()}
    found["torch"] = torch_settings()
    for path, obj in (*strategy.model.named_modules(prefix="model"), *(modules or [("criterion", criterion)])):
        if isinstance(obj, (*_FUNCTIONS, partial)):
            found[path] = {"function": as_text(obj)}
        elif not is_from(type(obj), "avalanche_amnesia"):
            is_loss = path.startswith("criterion") and isinstance(obj, nn.Module)  # the model's are what tasks train
            own = [*obj.named_parameters(recurse=False), *obj.named_buffers(recurse=False)] if is_loss else []
            found[path] = {name: as_text(value) for name, value in (*_attributes(obj), *own)}
            if path.startswith("model.backbone"):  # heads of finished tasks are frozen
                found[path]["requires_grad"] = str([p.requires_grad for p in obj.parameters(recurse=False)])
            if path.startswith(("model.backbone", "criterion")):
                inner = obj.named_children() if isinstance(obj, nn.Module) else ()
                found[path]["class"] = str([as_text(type(obj)), *((name, as_text(type(m))) for name, m in inner)])
    return found


def torch_settings() -> dict[str, str]:
    """Return name → value, as text, of torch's settings that can change the bits of a result."""
    values = {name: attrgetter(name)(torch) for name in _SETTINGS.split()}
    values["set_flush_denormal"] = torch.full((), 1e-40).mul(0.5).item() == 0
    return {name: str(value() if callable(value) else value) for name, value in values.items()}


def changed_attributes(before: Attributes, now: Attributes) -> str:
    """Return, as text, up to three names of changed, new or lost attributes of modules in both arguments; or ``""``."""
    both = [(path, {**before[path], **now[path]}) for path in before.keys() & now.keys()]
    names = [f"{path}.{name}" for path, of in both for name in of if before[path].get(name) != now[path].get(name)]
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _values_read_by(kind: type) -> dict[str, Any]:
    """Return name → value of globals, closures, defaults, class attributes that a user's module class reads."""
    bases = (*kind.__mro__, *inspect.getmro(type(kind)))
    closed = [base for base in bases if is_installed(base)]
    own = [item for base in bases if base not in closed for item in vars(base).items()]
    # What runs begins with methods that closed code calls.
    known = {name for name, _ in own if name.startswith("__") or any(hasattr(base, name) for base in closed)}
    called = known - _NO_PARTS
    todo, found, seen = [item for item in own if item[0] in called], dict[str, Any](), set(map(id, bases))
    for name, value in todo:
        is_code = isinstance(value, (FunctionType, type))
        if isinstance(value, WRAPPERS) or (is_code and not is_installed(value)):
            if id(value) not in seen:
                seen.add(id(value))
                place = value.__qualname__.rpartition("<locals>.")[2] if is_code else name
                text = value.__code__ if isinstance(value, FunctionType) else "code"
                found[place] = value if isinstance(value, _CACHE) else text
                parts = ((where, part) for where, part in parts_of(value) if where[:3] != ".__" or callable(part))
                todo += [(f"{place}{where}", part) for where, part in parts]
                names = _names_in(value.__code__)[1] if isinstance(value, FunctionType) else ()
                todo += [item for item in own if item[0] in names]
        elif not (inspect.isdatadescriptor(value) and is_closed(type(value))):
            found.setdefault(name, as_text(value) if is_code and not is_closed(value) else value)
    return found


def parts_of(code: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of attributes, bases, defaults, closure and globals of a class or callable."""
    inner = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget", "fset")
    is_plain = isinstance(code, (type, FunctionType))
    held = vars(code) if is_plain else {name: getattr(code, name) for name in inner if hasattr(code, name)}
    yield from ((f".{name}", value) for name, value in held.items() if name not in _OF_EVERY_CLASS)
    if isinstance(code, type):
        yield from ((f".base[{at}]", base) for at, base in enumerate((*code.__bases__, type(code))))
    elif is_plain:
        defaults = dict(enumerate(code.__defaults__ or ())) | (code.__kwdefaults__ or {})
        todo = [(f".default[{name}]", value) for name, value in defaults.items()]
        todo += [(f".<closure>.{name}", value) for name, value in _closure_values(code)]
        names, attributes = _names_in(code.__code__)
        inside = _READING | code.__globals__
        package = inside.get("__package__")  # of a relative import
        modules = {name: sys.modules.get(name, sys.modules.get(f"{package}.{name}".rstrip("."))) for name in names}
        todo += [(f".<global>.{name}", inside.get(name, modules[name])) for name in names]
        todo += [(f".{name}", globals) for name in attributes if name in ("__dict__", "__globals__")]
        seen = set[int]()
        for place, value in todo:
            is_module, held = isinstance(value, ModuleType), getattr(value, "__dict__", {})
            yield from () if is_module or value is None else ((place, value),)
            if id(value) not in seen and not isinstance(value, CONTAINERS):
                seen.add(id(value))
                may_get = "getattr" in attributes and is_module and not _is_installed(value.__name__)
                every = [at for at, v in held.items() if at[:2] != "__" and (_is_leaf(v) or _is_plain(v)) and may_get]
                read = ((at, held[at]) for at in (*attributes, "__getattr__", *every) if at in held)
                todo += ((f"{place}.{at}", part) for at, part in read if is_module or _is_plain(part))


def _closure_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each variable in the closure of a function."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a name that the outer function has not bound yet
            yield name, cell.cell_contents


@lru_cache(None)
def _names_in(code: CodeType) -> tuple[dict[str, None], dict[str, None]]:
    """Return names of globals, and names of globals and attributes together, in code and its nested functions."""
    found = dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_NAME")))
    names = dict.fromkeys(code.co_names)
    for nested in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        found, names = found | _names_in(nested)[0], names | _names_in(nested)[1]
    return found, names


def attributes(obj: Any) -> dict[str, Any]:
    """Return name → value of an object's attributes, also of those in slots."""
    state: Any = object.__getstate__(obj)  # a tuple if the class has slots
    return {**getattr(obj, "__dict__", {}), **(state[1] if isinstance(state, tuple) else {})}


def _attributes(obj: Any) -> list[tuple[str, Any]]:
    left_out = Tensor if isinstance(obj, nn.Module) and is_closed(type(obj)) else ()  # torch computes them there
    return [(n, v) for n, v in attributes(obj).items() if n not in _OF_EVERY_MODULE and not isinstance(v, left_out)]


def as_text(value: Any) -> str:
    """Return text for a plain value, a tensor, an array or a function, and the class name for any other object."""
    if isinstance(value, Tensor):
        return tensor_hash(value)
    if isinstance(value, np.ndarray):
        held = as_text(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        return f"{value.dtype} {value.shape} {blake3(held).hexdigest()}"
    if isinstance(value, _FUNCTIONS):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, CodeType):  # without the docstring, a function's first constant
        constants = [as_text(constant) for constant in value.co_consts[not value.co_name.startswith("<") :]]
        return blake3(f"{value.co_code.hex()} {value.co_names} {constants}".encode()).hexdigest()
    if isinstance(value, partial):
        return str([*map(as_text, (value.func, *value.args, *value.keywords, *value.keywords.values()))])
    items = [*value.items()] if isinstance(value, dict) and _is_plain(value) else value
    if isinstance(items, (list, tuple, set, frozenset)) and len(items) < LONG:  # sets have other orders elsewhere
        return str(sorted(map(as_text, items)) if isinstance(items, (set, frozenset)) else [*map(as_text, items)])
    if _is_plain(value):
        return str(value) if isinstance(value, Enum) else repr(value)
    return type(value).__qualname__ + (f" of {len(value)}" if isinstance(value, CONTAINERS) else "")


def _is_plain(value: Any) -> bool:
    items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    is_plain = isinstance(value, (*_PLAIN, np.generic))
    return is_plain or (isinstance(value, CONTAINERS) and len(value) < LONG and all(map(_is_plain, items)))
