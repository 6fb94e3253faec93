"""Walk over everything that an object holds: through attributes, containers, closures and running generators."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from avalanche_amnesia.bits import tensor_hash

_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, Enum, np.generic)
_PLAIN_TORCH = (torch.dtype, torch.device, torch.Size, torch.Generator)
_LEAVES = (*_PLAIN, *_PLAIN_TORCH)
# What leads out of a strategy: into the user's benchmark, and into a logger's machinery.
_LEADING_OUT = frozenset({"origin_stream", "_origin_stream", "benchmark", "_benchmark", "__weakref__"})
_FOREIGN = ("wandb", "threading", "asyncio", "logging", "matplotlib", "_io", "weakref")


class Parts:
    """Modules, parameters and buffers of a model, listed when a module or tensor is first looked for among them.

    Args:
        model: with many tasks it has many parts; most things hold none, and need no list.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._listed: frozenset[int] | None = None

    def __contains__(self, thing: object) -> bool:
        if not isinstance(thing, (Tensor, nn.Module)):
            return False
        if self._listed is None:
            parts = (*self._model.modules(), *self._model.parameters(), *self._model.buffers())
            self._listed = frozenset(map(id, parts))
        return id(thing) in self._listed


def reachable(
    root: object,
    name: str = "",
    skip: Iterable[object] = (),
    enter: Callable[[object], bool] = lambda thing: True,
    beside: Parts | None = None,
) -> Iterator[tuple[str, object]]:
    """Every object that can be reached from one, each once, with the path to it.

    Modules, tensors (their gradients too), arrays, mappings, sequences, sets, attributes and slots, partial
    functions, closures, bound methods and generators are followed. A benchmark's streams, to which an experience leads
    back, are not: they are the user's own.

    Args:
        root: where to start.
        name: its name, for the paths.
        skip: objects that are neither given nor entered.
        enter: False for an object that is given, but not entered.
        beside: parts of a model, which are skipped too unless one of them is the root.
    """
    if isinstance(root, _LEAVES):
        return  # before the many that are to be skipped are looked through
    seen = {id(thing) for thing in skip}
    stack: list[tuple[str, object]] = [(name, root)]
    alive = []  # an id is a name only as long as its object lives
    while stack:
        path, thing = stack.pop()
        if id(thing) in seen or isinstance(thing, _LEAVES):
            continue
        if beside is not None and thing is not root and thing in beside:
            continue
        seen.add(id(thing))
        alive.append(thing)
        if type(thing).__module__.split(".")[0] in _FOREIGN:
            continue
        yield path, thing
        if enter(thing):
            stack.extend(reversed(list(_parts(path, thing))))


def _parts(path: str, thing: Any) -> Iterator[tuple[str, object]]:
    if isinstance(thing, Tensor):
        if thing.is_leaf and thing.grad is not None:
            yield f"{path}.grad", thing.grad
        return
    if isinstance(thing, np.ndarray):
        if thing.dtype == object:
            yield from ((f"{path}[{i}]", item) for i, item in enumerate(thing.reshape(-1).tolist()))
        return
    if isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[{type(key).__name__}]", value
            yield f"{path}.key", key
    elif isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(list(thing)))
    elif isinstance(thing, functools.partial):
        yield f"{path}.func", thing.func
        yield f"{path}.args", thing.args
        yield f"{path}.keywords", thing.keywords
    elif isinstance(thing, types.MethodType):
        yield f"{path}.__self__", thing.__self__
    elif isinstance(thing, types.FunctionType):
        yield f"{path}.__defaults__", thing.__defaults__
        yield f"{path}.__kwdefaults__", thing.__kwdefaults__
        for cell_name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            try:
                yield f"{path}.<closure>.{cell_name}", cell.cell_contents
            except ValueError:  # a name that the outer function has not bound yet
                continue
    elif isinstance(thing, types.GeneratorType) and thing.gi_frame is not None:
        yield from ((f"{path}.<running>.{key}", value) for key, value in thing.gi_frame.f_locals.items())
    yield from _attributes(path, thing)


def _attributes(path: str, thing: Any) -> Iterator[tuple[str, object]]:
    attributes = dict(getattr(thing, "__dict__", None) or {})
    if isinstance(thing, nn.Module):
        for inner in ("_parameters", "_buffers", "_modules"):
            yield from ((f"{path}.{key}", value) for key, value in attributes.pop(inner, {}).items())
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, slot):
                attributes.setdefault(slot, getattr(thing, slot))
    yield from ((f"{path}.{key}".lstrip("."), value) for key, value in attributes.items() if key not in _LEADING_OUT)


def memory_of(
    root: object, name: str, skip: Iterable[object] = (), beside: Parts | None = None
) -> tuple[tuple[str, str], ...]:
    """Path and value of every tensor and number that can be reached from an object; tensors as hashes.

    Numbers in attributes, containers, closures and the globals that a function names count too: two calls give the same
    as long as nothing of it has changed.

    Args:
        root: where to start.
        name: its name, for the paths.
        skip: objects that are neither read nor entered.
        beside: parts of a model, which are not either.
    """
    found: list[tuple[str, str]] = []
    for path, thing in reachable(root, name, skip, beside=beside):
        if isinstance(thing, Tensor):
            found.append((path, tensor_hash(thing, "sha256")))  # as saved states have it
        elif not isinstance(thing, type):
            found += [(f"{path}{place}", repr(value)) for place, value in _numbers(thing)]
    return tuple(found)


def _numbers(thing: Any) -> Iterator[tuple[str, float]]:
    """Numbers that an object holds directly, by their places."""
    places: dict[str, Any] = {f".{key}": value for key, value in (getattr(thing, "__dict__", None) or {}).items()}
    if isinstance(thing, Mapping):
        places |= {f"[{key!r}]": value for key, value in thing.items()}
    elif isinstance(thing, (list, tuple, set, frozenset)):
        places |= {f"[{at}]": value for at, value in enumerate(thing)}
    elif isinstance(thing, types.FunctionType):
        code = thing.__code__
        for cell_name, cell in zip(code.co_freevars, thing.__closure__ or (), strict=True):
            with suppress(ValueError):  # a name that the outer function has not bound yet
                places[f".<closure>.{cell_name}"] = cell.cell_contents
        places |= {f".<global>.{key}": thing.__globals__[key] for key in code.co_names if key in thing.__globals__}
    yield from ((place, value) for place, value in places.items() if type(value) in (int, float))
