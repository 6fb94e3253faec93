"""Code that a script gives to its run: functions and classes that belong to no installed package, and what they use."""

import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.object_walk import held

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_OUR_OWN = __name__.split(".")[0]
_HOSTS = frozenset({_OUR_OWN, "avalanche", "wandb"})
"""Packages whose objects lead to strategies, streams and loggers, of which the state or the data have what counts."""
_OF_EVERY_CLASS = frozenset({"__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "__annotations__"})
_WRAPPERS = (staticmethod, classmethod, functools.cached_property, property)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def script_code(things: Iterable[object], skip: Collection[object] = ()) -> list[str]:
    """Lines that differ where functions or classes differ that a script gives, or anything that they use.

    Followed are what functions name, capture and have as defaults, and what classes hold: other functions and classes
    of the script, numbers, texts and tensors. Of installed packages the name and version stand there.
    """
    lines: set[str] = set()
    seen = {id(thing) for thing in skip}
    alive = []  # an id is a name only as long as its object lives
    stack = list(things)
    while stack:
        thing = stack.pop()
        if isinstance(thing, (*_PLAIN, Tensor, types.CodeType)) or id(thing) in seen:
            continue  # the line of what holds a plain value has it
        seen.add(id(thing))
        alive.append(thing)
        package = _package_of(thing)
        if package is not None:
            lines.add(package)
            continue
        name = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
        parts = list(_parts(thing))
        lines |= {f"{name}{place} {_as_text(part)}" for place, part in parts}
        stack += [part for _, part in parts]
    return sorted(lines)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Parts of a function, a class or another object, with their places in it."""
    if isinstance(thing, types.ModuleType):
        return  # what functions name of it is theirs
    if isinstance(thing, type):
        yield from ((f".base[{at}]", base) for at, base in enumerate(thing.__bases__))
        yield from ((f".{name}", value) for name, value in vars(thing).items() if name not in _OF_EVERY_CLASS)
        return
    if isinstance(thing, types.FunctionType):
        yield ".code", thing.__code__
        yield from _named(thing.__code__, thing.__globals__)
    elif isinstance(thing, _WRAPPERS):
        yield from ((f".{name}", getattr(thing, name, None)) for name in ("__func__", "func", "fget", "fset"))
    else:
        yield ".class", type(thing)
        if type(thing).__module__.split(".")[0] in _HOSTS and not isinstance(thing, nn.Module):
            return
    yield from held(thing)


def _named(code: types.CodeType, around: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Globals that code names, in functions inside it too, and what it may name of modules among them."""
    for name in code.co_names:
        value = around.get(name)
        if isinstance(value, types.ModuleType) and _package_of(value) is None:
            inside = {other: vars(value)[other] for other in code.co_names if other in vars(value)}
            yield from ((f".{name}.{other}", found) for other, found in inside.items())
        elif name in around:
            yield f".{name}", value
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant, around)


def _as_text(part: object) -> str:
    """Text of a plain value, a tensor or code; of anything else its kind: it is followed by itself."""
    if isinstance(part, _PLAIN):
        return repr(part)
    if isinstance(part, Tensor):
        return tensor_hash(part)
    if isinstance(part, np.ndarray):
        return f"{part.dtype} {part.shape} {hashlib.sha256(part.tobytes()).hexdigest()}"
    if isinstance(part, types.CodeType):
        constants = [_as_text(constant) for constant in part.co_consts]
        return f"{part.co_code.hex()} {part.co_names} {constants}"
    return type(part).__qualname__


def _package_of(thing: Any) -> str | None:
    """Name and version of the installed package that something belongs to; None for what a script gives."""
    if isinstance(thing, types.ModuleType):
        name = thing.__name__
    elif isinstance(thing, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = str(thing.__module__)
    else:
        return None
    top = name.split(".")[0]
    if top == "__main__":
        return None  # whatever file it is: a worker's own is none of the script
    module = sys.modules.get(top)
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    if top not in sys.stdlib_module_names and top != _OUR_OWN and not any(p.startswith(_INSTALLED) for p in places):
        return None
    return f"{top} {getattr(module, '__version__', '')}".strip()
