"""Code and values: whether code is closed (of known packages), its parts, and texts to compare between trainings.

A network's modules count as closed, because their tensors, plain attributes, arrays and functions are compared between
trainings (:func:`attributes_of`), and so are values that their code reads elsewhere (:func:`values_read_by`).
"""

import dis
import inspect
import logging
import marshal
import os
import sys
import sysconfig
from collections import deque, namedtuple
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from avalanche_amnesia.bits import sums_of_bits, tensor_hash
from avalanche_amnesia.saving.strategy_settings import is_from
from avalanche_amnesia.strategy import Strategy

_CLOSED = {"avalanche_amnesia", "avalanche", "torch", "torchvision", "numpy", "PIL", "pybind11_builtins"}
_CLOSED |= {"typing_extensions", *sys.stdlib_module_names}
INSTALLED = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
_PATHS = [path for name in _CLOSED for path in getattr(sys.modules.get(name), "__path__", ())]
FILES = (os.path.dirname(os.__file__), "<frozen ", *INSTALLED, *_PATHS)
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
PLAIN = (bool, int, float, complex, str, bytes, range, Enum, PurePath, type(None), type(...), np.generic, *_OF_TORCH)
LEAVES = (*PLAIN, Tensor, np.ndarray, ModuleType, CodeType, logging.Logger)
FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
CALLED = (*FUNCTIONS, MethodType, MethodWrapperType, partial)
CACHE = type(lru_cache(open))
WRAPPERS = (staticmethod, classmethod, property, cached_property, CACHE)
CONTAINERS = (list, tuple, set, frozenset, deque, dict)
LONG = 1000  # longer containers hold samples
_LEADING_ANYWHERE = ("__dict__", "__globals__", "__subclasses__", "f_globals", "f_locals")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WRITTEN = "module doc dict weakref annotations qualname firstlineno static_attributes parameters slotnames orig_bases"
_WRITTEN += " abstractmethods subclasshook"
_OF_EVERY_CLASS = {"_abc_impl", "_is_protocol", *(f"__{name}__" for name in _WRITTEN.split())}
NO_PARTS = {*_OF_EVERY_CLASS, "__init__"}
_OF_TUPLES = {*vars(namedtuple("_Generated", "")), *_OF_EVERY_CLASS}
_SETTINGS = "get_default_dtype get_default_device get_num_threads get_float32_matmul_precision _C._get_mkldnn_enabled"
_SETTINGS += " are_deterministic_algorithms_enabled backends.mha.get_fastpath_enabled backends.cuda.math_sdp_enabled"
_SETTINGS += " utils.deterministic.fill_uninitialized_memory backends.cuda.flash_sdp_enabled backends.cudnn.benchmark"
_SETTINGS += " backends.cuda.matmul.fp32_precision backends.cudnn.conv.fp32_precision backends.cudnn.deterministic"


def is_closed(obj: Any) -> bool:
    """Return True if a class or function is defined in a closed package, or ``namedtuple`` has generated the class."""
    is_tuple = getattr(obj, "__bases__", ()) == (tuple,) and getattr(obj.__repr__, "__module__", "") == "collections"
    # Without methods of the user's.
    return all(map(is_closed_module, _modules_of(obj))) or (is_tuple and vars(obj).keys() - obj._fields <= _OF_TUPLES)


def _modules_of(obj: Any) -> tuple[str, ...]:
    """Return names of modules: the stated one of a class, function or object; of a function also that of its code."""
    own = str(getattr(obj, "__module__", None))  # functools.wraps copies it from the function that it replaces
    if not isinstance(obj, FunctionType):
        return (own,)
    inside, file = obj.__globals__, obj.__code__.co_filename
    # Data classes generate methods from text, torch.fx functions without a module. Others run in their module, because
    # code may be compiled in the name of any file, unless the module has replaced itself by an object.
    module = sys.modules.get(getattr(inside.get("__spec__"), "name", "__main__"))
    is_known = file.startswith(FILES) or (file == "<string>" and obj.__name__[:2] == "__")
    is_known &= type(module) is not ModuleType or vars(module) is inside
    return own, str(inside.get("__name__")) if is_known or file.startswith("<eval_with_key>") else "__main__"


@lru_cache(None)
def is_closed_module(module: str) -> bool:
    """Return True for a module of a closed package, unless a script has hidden a standard module by one of its own."""
    package = module.partition(".")[0].replace("None", "builtins")
    file = getattr(sys.modules.get(package), "__file__", None) or FILES[0]
    # Objects of torch.jit hold compiled code of users.
    return package in _CLOSED and file.startswith(FILES) and not module.startswith("torch.jit")


def is_installed(obj: Any) -> bool:
    """Return True if a class or function is defined in an installed package, also in Python's library."""
    return all(map(is_installed_module, _modules_of(obj)))


@lru_cache(None)
def is_installed_module(module: str) -> bool:
    package = sys.modules.get(module.partition(".")[0])
    places = [getattr(package, "__file__", None) or "", *getattr(package, "__path__", ())]
    return module != "__main__" and (is_closed_module(module) or any(place.startswith(INSTALLED) for place in places))


def is_leaf(value: Any) -> bool:
    """Return True for a plain value, tensor, array, module or code of a closed class, without objects inside."""
    return is_leaf_class(type(value)) and not (isinstance(value, np.ndarray) and value.dtype.hasobject)


is_leaf_class: Any = lru_cache(10_000)(lambda kind: issubclass(kind, LEAVES) and is_closed(kind))


def attributes(obj: Any) -> dict[str, Any]:
    """Return name → value of an object's attributes, also of those in slots."""
    state: Any = object.__getstate__(obj)  # a tuple if the class has slots
    return {**getattr(obj, "__dict__", {}), **(state[1] if isinstance(state, tuple) else {})}


def own_attributes(obj: Any) -> list[tuple[str, Any]]:
    left_out = Tensor if isinstance(obj, nn.Module) and is_closed(type(obj)) else ()  # torch computes them there
    return [(n, v) for n, v in attributes(obj).items() if n not in _OF_EVERY_MODULE and not isinstance(v, left_out)]


def values_read_by(kind: type) -> dict[str, Any]:
    """Return name → value of globals, closures, defaults, class attributes that a user's module class reads."""
    bases = (*kind.__mro__, *inspect.getmro(type(kind)))
    closed = [base for base in bases if is_installed(base)]
    own = [item for base in bases if base not in closed for item in vars(base).items()]
    # What runs begins with methods that closed code calls.
    known = {name for name, _ in own if name.startswith("__") or any(hasattr(base, name) for base in closed)}
    todo = [item for item in own if item[0] in known - NO_PARTS]
    found, seen = dict[str, Any](), set(map(id, bases))
    for name, value in todo:
        is_code = isinstance(value, (FunctionType, type))
        if isinstance(value, WRAPPERS) or (is_code and not is_installed(value)):
            if id(value) not in seen:
                seen.add(id(value))
                place = value.__qualname__.rpartition("<locals>.")[2] if is_code else name
                text = value.__code__ if isinstance(value, FunctionType) else "code"
                found[place] = value if isinstance(value, CACHE) else text
                parts = ((where, part) for where, part in parts_of(value) if where[:3] != ".__" or callable(part))
                todo += [(f"{place}{where}", part) for where, part in parts]
                names = _names_in(value.__code__)[1] if isinstance(value, FunctionType) else {}
                every = "getattr" in names or "__getattribute__" in names  # may get any method
                todo += [item for item in own if item[0] in names or (every and item[0] not in NO_PARTS)]
        elif not (inspect.isdatadescriptor(value) and is_closed(type(value))):
            found.setdefault(name, as_text(value) if is_code and not is_closed(value) else value)
    return found


def parts_of(code: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of attributes, bases, defaults, closure and globals of a class or callable."""
    inner = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget", "fset")
    is_code = isinstance(code, (type, FunctionType))
    held = vars(code) if is_code else {name: getattr(code, name) for name in inner if hasattr(code, name)}
    yield from ((f".{name}", value) for name, value in held.items() if name not in _OF_EVERY_CLASS)
    if isinstance(code, type):
        yield from ((f".base[{at}]", base) for at, base in enumerate((*code.__bases__, type(code))))
    elif is_code:
        defaults = dict(enumerate(code.__defaults__ or ())) | (code.__kwdefaults__ or {})
        todo = [(f".default[{name}]", value) for name, value in defaults.items()]
        todo += [(f".<closure>.{name}", value) for name, value in closure_values(code)]
        names, attributes = _names_in(code.__code__)
        inside = {**code.__builtins__, **code.__globals__}
        package = inside.get("__package__")  # of a relative import
        modules = {name: sys.modules.get(name, sys.modules.get(f"{package}.{name}".rstrip("."))) for name in names}
        todo += [(f".<global>.{name}", inside.get(name, modules[name])) for name in names]
        todo += [(f".{name}", globals) for name in attributes if name in _LEADING_ANYWHERE]
        seen = set[int]()
        for place, value in todo:
            is_module, held = isinstance(value, ModuleType), getattr(value, "__dict__", {})
            yield from () if is_module or value is None else ((place, value),)
            if id(value) not in seen and not isinstance(value, CONTAINERS):
                seen.add(id(value))
                may_get = "getattr" in attributes and is_module and not is_installed_module(value.__name__)
                every = [at for at, v in held.items() if at[:2] != "__" and (is_leaf(v) or is_plain(v)) and may_get]
                read = ((at, held[at]) for at in (*attributes, "__getattr__", *every) if at in held)
                todo += ((f"{place}.{at}", part) for at, part in read if is_module or is_plain(part))


def closure_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
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


def as_text(value: Any) -> str:
    """Return text for a plain value, a tensor, an array or a function, and the class name for any other object."""
    if isinstance(value, Tensor):
        return str([value.requires_grad, tensor_hash(value), *((n, as_text(v)) for n, v in vars(value).items())])
    if isinstance(value, np.ndarray):
        held = as_text(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        return f"{value.dtype} {value.shape} {blake3(held).hexdigest()}"
    if isinstance(value, FUNCTIONS):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, CodeType):  # without the docstring, a function's first constant
        constants = [as_text(constant) for constant in value.co_consts[not value.co_name.startswith("<") :]]
        return blake3(f"{value.co_code.hex()} {value.co_names} {constants}".encode()).hexdigest()
    if isinstance(value, partial):
        return str([*map(as_text, (value.func, *value.args, *value.keywords, *value.keywords.values()))])
    value = value.level if isinstance(value, logging.Logger) else value
    items = [*value.items()] if isinstance(value, dict) and is_plain(value) else value
    if isinstance(items, (list, tuple, set, frozenset)) and len(items) < LONG:  # sets have other orders elsewhere
        return str(sorted(map(as_text, items)) if isinstance(items, (set, frozenset)) else [*map(as_text, items)])
    if is_plain(value):
        return str(value) if isinstance(value, Enum) else repr(value)
    return type(value).__qualname__ + (f" of {len(value)}" if isinstance(value, CONTAINERS) else "")


def is_plain(value: Any) -> bool:
    """Return True for a value, also a short container of such values, whose text says all of it."""
    if isinstance(value, CONTAINERS) and len(value) < LONG:
        return all(map(is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return isinstance(value, PLAIN)


def excerpt(value: Any, nbytes: int = 0) -> str:
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
        return str([*map(excerpt, entries[:: len(entries) // LONG + 1])])
    return as_text(value) if is_plain(value) else f"{type(value).__qualname__} {id(value)}"


def hash_with_files(values: Any, most: int = 10_000) -> str:
    """Return a hash of plain values, and size and time of ``most`` files they name; raise ValueError for others."""
    texts = [t for each in values for t in (each if isinstance(each, (tuple, list)) else (each,)) if isinstance(t, str)]
    files = [os.stat(text) for text in texts[:: len(texts) // most + 1] if os.path.isfile(text)]
    return blake3(marshal.dumps([values, [(file.st_size, file.st_mtime_ns) for file in files]], 2)).hexdigest()


Attributes = dict[str, dict[str, str]]
"""Path of a module or of the loss → attribute → value as text; tensors as hashes."""


def attributes_of(strategy: Strategy) -> Attributes:
    """Return path → attribute → value as text, for the network's modules, their code, the loss, and torch itself."""
    criterion: Any = strategy._criterion
    criterion = criterion.__self__ if isinstance(criterion, MethodType) else criterion
    modules = list(criterion.named_modules(prefix="criterion")) if isinstance(criterion, nn.Module) else []
    found: Attributes = {"torch": torch_settings()}
    for kind in dict.fromkeys(map(type, strategy.model.modules())):
        found[f"code of {kind.__name__}"] = {name: as_text(value) for name, value in values_read_by(kind).items()}
    for path, obj in (*strategy.model.named_modules(prefix="model"), *(modules or [("criterion", criterion)])):
        if isinstance(obj, (*FUNCTIONS, partial)):
            found[path] = {"function": as_text(obj)}
        elif not is_from(type(obj), "avalanche_amnesia"):
            is_loss = path.startswith("criterion") and isinstance(obj, nn.Module)  # the model's are what tasks train
            own = [*obj.named_parameters(recurse=False), *obj.named_buffers(recurse=False)] if is_loss else []
            found[path] = {name: as_text(value) for name, value in (*own_attributes(obj), *own)}
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
