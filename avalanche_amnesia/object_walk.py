"""Walk over all objects reachable through attributes, containers, closures and generators."""

import functools
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LEAVES = (
    *(str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, Enum, PurePath, np.generic),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
# Attributes and modules at which the walk stops: the user's benchmark and the internals of loggers.
_LEADING_OUT = frozenset({"origin_stream", "_origin_stream", "benchmark", "_benchmark", "__weakref__"})
_FOREIGN = ("wandb", "threading", "asyncio", "logging", "matplotlib", "_io", "weakref")


def reachable(
    root: object,
    name: str = "",
    skip: Iterable[object] = (),
    enter: Callable[[object], bool] = lambda thing: True,
    beside: Container[object] | None = None,
) -> Iterator[tuple[str, object]]:
    """Yield every object reachable from the roots once, with its path.

    The walk follows modules, tensors (also their gradients), arrays, mappings, sequences, sets, attributes, slots,
    partial functions, closures, bound methods and generators. It does not follow an experience to its benchmark's
    streams because these belong to the user.
    """
    if _is_leaf(root):
        return  # before the loop over ``skip``, which may be long
    seen = {id(thing) for thing in skip}
    stack: list[tuple[str, object]] = [(name, root)]
    alive = []  # keeps the objects alive, so that no id is used twice
    while stack:
        path, thing = stack.pop()
        if id(thing) in seen or (beside is not None and thing is not root and thing in beside):
            continue
        seen.add(id(thing))
        alive.append(thing)
        kind: Any = type(thing)
        if is_foreign(kind):
            continue
        yield path, thing
        if enter(thing):
            inside = [(place, part) for place, part in contents(thing) if not _is_leaf(part)]
            stack.extend((f"{path}{place}".lstrip("."), part) for place, part in reversed(inside))


def _is_leaf(thing: object) -> bool:
    kind: Any = type(thing)
    return _is_kind_of_leaf(kind)


@cache  # most objects are numbers and strings of few types
def _is_kind_of_leaf(kind: type) -> bool:
    return issubclass(kind, _LEAVES)


@cache
def is_foreign(kind: type) -> bool:
    """Return True for classes of loggers, files and threads, whose internals are no values."""
    return kind.__module__.partition(".")[0] in _FOREIGN


def contents(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct contents of an object, plain values included, with their places."""
    if isinstance(thing, Tensor):
        if thing.is_leaf and thing.grad is not None:
            yield ".grad", thing.grad
        return
    if isinstance(thing, np.ndarray):
        thing = thing.reshape(-1).tolist() if thing.dtype == object else []
    if isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield f"[{key!r}]" if _is_leaf(key) else f"[{type(key).__name__}]", value
            if not _is_leaf(key):
                yield ".key", key
    elif isinstance(thing, (list, tuple, deque)):
        yield from ((f"[{at}]", value) for at, value in enumerate(list(thing)))
    elif isinstance(thing, (set, frozenset)):
        yield from (("{…}", value) for value in list(thing))
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, types.FunctionType):
        yield from ((".__defaults__", thing.__defaults__), (".__kwdefaults__", thing.__kwdefaults__))
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            with suppress(ValueError):  # a name that the outer function has not bound yet
                yield f".<closure>.{name}", cell.cell_contents
    elif isinstance(thing, types.GeneratorType) and thing.gi_frame is not None:
        yield from ((f".<running>.{name}", value) for name, value in thing.gi_frame.f_locals.items())
    kind: Any = type(thing)
    attributes = dict(getattr(thing, "__dict__", None) or {})
    inner = [attributes.pop(name, {}) for name in _OF_MODULES] if isinstance(thing, nn.Module) else []
    attributes |= {slot: getattr(thing, slot) for slot in _slots(kind) if hasattr(thing, slot)}
    for named in (*inner, attributes):
        yield from ((f".{name}", value) for name, value in named.items() if name not in _LEADING_OUT)


@cache
def _slots(kind: type) -> tuple[str, ...]:
    found = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    return tuple(slot for slots in found for slot in ((slots,) if isinstance(slots, str) else slots))
