"""Encoding of what an object holds: plain JSON, and tensors beside it."""

from __future__ import annotations

import base64
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from avalanche_amnesia.saving.classes import name_of, saveable_class
from avalanche_amnesia.saving.files import StateError

GIVEN = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
"""Things that a script gives and no state holds: they are taken from the object that the state is loaded into."""


@dataclass(frozen=True)
class Adapter:
    """Way of another library's objects into a state and back, by plain values."""

    name: str
    kind: type
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]


class Encoder:
    """Encodes values as JSON and collects their tensors.

    An object is its attributes, under the name of its class; one that lies at two places is encoded once. The numbers
    are exact to the bit. Tensors of an object whose class says so (``saved_apart = True``) are a group of their own: a
    file that other states can share.
    """

    def __init__(
        self, known: Mapping[str, object], adapters: Sequence[Adapter] = (), given: tuple[type, ...] = ()
    ) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self._known = {id(thing): name for name, thing in known.items()}
        self._adapters, self._given, self._group = adapters, (*GIVEN, Enum, *given), "state"
        self._seen: dict[int, int] = {}
        self._places: dict[int, tuple[str, str]] = {}
        self._alive: list[object] = []  # an id is a name only as long as its object lives

    def encode(self, value: Any, path: str) -> Any:
        """JSON of a value."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if isfinite(value) else {"float": str(value)}
        if id(value) in self._known:
            return {"known": self._known[id(value)]}
        if type(value) is list:
            return [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        plain = self._plain(value, path)
        return self._object(value, path) if plain is None else plain

    def _plain(self, value: Any, path: str) -> dict[str, Any] | None:
        """JSON of a value of a standard type; None for any other."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if type(value) in _CONTAINERS:
            return {_CONTAINERS[type(value)]: [self.encode(item, f"{path}[…]") for item in _in_order(value)]}
        if type(value) in _MAPPINGS:
            return {_MAPPINGS[type(value)]: self._items(value, path)}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, np.generic):
            return {"number": [str(value.dtype), value.item()]}
        if isinstance(value, np.ndarray) and value.dtype != object:
            return {"array": self._tensor(torch.from_numpy(np.ascontiguousarray(value)), path)}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, torch.Generator):
            return {"generator": [str(value.device), self._tensor(value.get_state(), path)]}
        if isinstance(value, self._given) or getattr(type(value), "given_by_the_script", False) or value is ...:
            return {"given": _given_name(value)}
        return None

    def _items(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        return [[self.encode(k, f"{path}.key"), self.encode(v, f"{path}[{k!r}]")] for k, v in value.items()]

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if id(value) not in self._places:
            self._alive.append(value)
            held = self.tensors.setdefault(self._group, {})
            name = path if path not in held else f"{path} ({len(held)})"
            held[name] = value.detach()
            self._places[id(value)] = (self._group, name)
        kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        return {kind: [*self._places[id(value)], value.device.type, value.requires_grad]}

    def _object(self, value: Any, path: str) -> dict[str, Any]:
        if id(value) in self._seen:
            return {"same": self._seen[id(value)]}
        self._note(value)
        code: dict[str, Any] = {"object": self._seen[id(value)], "class": name_of(type(value))}
        around = self._group
        if getattr(type(value), "saved_apart", False):
            self._group = f"{type(value).__name__.lower()}{self._seen[id(value)]}"
        try:
            if isinstance(value, nn.Module):
                return code | self._module(value, path)
            for adapter in self._adapters:
                if isinstance(value, adapter.kind):
                    return code | {"adapter": adapter.name, "values": self.encode(adapter.take(value), path)}
            attributes = attributes_of(value)
            if attributes is None:
                raise StateError(
                    f"{path} is a {type(value).__name__}, which can't be saved; leave it out of what the plugin keeps, "
                    "or give the plugin's class a __getstate__ without it"
                )
            code["attributes"] = {name: self.encode(item, f"{path}.{name}") for name, item in attributes.items()}
            if isinstance(value, dict):
                code["items"] = self._items(value, path)
        finally:
            self._group = around
        return code

    def _module(self, module: nn.Module, path: str) -> dict[str, Any]:
        state = {
            name: self._tensor(value, f"{path}.{name}") for name, value in module.state_dict(keep_vars=True).items()
        }
        return {"state": state, "numbers": dict(module_numbers(module))}

    def _note(self, value: object) -> None:
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)


class Decoder:
    """Gives objects the values that an :class:`Encoder` wrote.

    No code is run that the state names: an object that is there already gets its values back in place, one that is not
    is made only where its class is :func:`~avalanche_amnesia.saving.saveable`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Mapping[str, Tensor]],
        known: Mapping[str, object],
        templates: Callable[[], Iterator[nn.Module]] = lambda: iter(()),
        device: torch.device | str = "cpu",
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._tensors, self._known, self._templates, self._device = tensors, known, templates, device
        self._made: dict[int, Any] = {}
        self._decoded: dict[tuple[str, str], Tensor] = {}

    def decode(self, code: Any, there: Any, path: str) -> Any:
        """The value of a code."""
        if code is None or type(code) in (bool, int, float, str):
            return code
        if type(code) is list:
            old = there if type(there) is list else []
            items = [self.decode(c, old[i] if i < len(old) else None, f"{path}[{i}]") for i, c in enumerate(code)]
            if type(there) is list:
                there[:] = items
                return there
            return items
        if not isinstance(code, dict) or not code:
            raise StateError(f"{path}: {code!r} is no code of a value")
        tag = next(iter(code))
        if tag == "object":
            return self._object(code, there, path)
        if tag in _DECODE:
            return _DECODE[tag](self, code[tag], there, path)
        raise StateError(f"{path}: {tag!r} is no code of a value")

    def _mapping(self, kind: Any, items: Any, there: Any, path: str) -> Any:
        old = there if type(there) is kind else {}
        pairs = []
        for key_code, value_code in items:
            key = self.decode(key_code, None, f"{path}.key")
            pairs.append((key, self.decode(value_code, old.get(key), f"{path}[{key!r}]")))
        if type(there) is kind:
            there.clear()
            there.update(pairs)
            return there
        if kind is defaultdict:
            raise StateError(f"{path}: a defaultdict is not there, and can't be made without its function")
        return kind(pairs)

    def _container(self, kind: Any, items: Any, there: Any, path: str) -> Any:
        in_place = kind is tuple and type(there) is tuple and len(there) == len(items)
        old = there if in_place else [None] * len(items)
        values = [self.decode(item, before, f"{path}[…]") for item, before in zip(items, old, strict=True)]
        if type(there) is kind and kind in (set, deque):
            there.clear()
            there.update(values) if kind is set else there.extend(values)
            return there
        return kind(values)

    def tensor(self, code: Any, there: Any = None, path: str = "") -> Tensor:
        """The tensor of a code."""
        group, name, device, requires_grad = code
        if (group, name) not in self._decoded:
            try:
                self._decoded[group, name] = (
                    self._tensors[group][name]
                    .to("cpu" if device == "cpu" else self._device)
                    .requires_grad_(requires_grad)
                )
            except (KeyError, RuntimeError) as error:
                raise StateError(f"{path}: tensor {name} of {group} can't be had ({error})") from error
        return self._decoded[group, name]

    def _parameter(self, code: Any, there: Any, path: str) -> nn.Parameter:
        value = self.tensor(code, there, path)
        if not isinstance(value, nn.Parameter):
            value = nn.Parameter(value.detach(), requires_grad=code[3])
            self._decoded[code[0], code[1]] = value
        return value

    def _known_object(self, name: Any, there: Any, path: str) -> object:
        if name not in self._known:
            raise StateError(f"{path} refers to {name}, which is not there")
        return self._known[name]

    def _same(self, number: Any, there: Any, path: str) -> Any:
        if number not in self._made:
            raise StateError(f"{path} refers to an object that the state does not hold")
        return self._made[number]

    def _given(self, name: Any, there: Any, path: str) -> Any:
        if there is None or _given_name(there) != name:
            raise StateError(
                f"{path} was {name}, which a script gives and no state holds; here it is {there!r}: build the strategy "
                "as it was built for the run that was saved"
            )
        return there

    def _object(self, code: Mapping[str, Any], there: Any, path: str) -> Any:
        name = code["class"]
        if "state" in code:
            self._made[code["object"]] = self._module(code, there, path)
            return self._made[code["object"]]
        if code.get("adapter") in self._adapters:
            values = self.decode(code["values"], None, path)
            self._made[code["object"]] = self._adapters[code["adapter"]].make(values)
            return self._made[code["object"]]
        same_class = there is not None and name_of(type(there)) == name
        kind = type(there) if same_class else saveable_class(name)
        if kind is None:
            raise StateError(
                f"{path} was a {name}, and is {'missing' if there is None else name_of(type(there))} here: build the "
                "strategy as it was built for the run that was saved"
            )
        result: Any = there if same_class else object_without_init(kind)
        self._made[code["object"]] = result
        kept_back = getattr(kind, "not_saved", ())
        for attribute, value in code["attributes"].items():
            if attribute.startswith("__") or attribute in kept_back:  # no encoder writes these
                raise StateError(f"{path}.{attribute} is nothing that a state may set")
            old = getattr(there, attribute, None) if same_class else None
            object.__setattr__(result, attribute, self.decode(value, old, f"{path}.{attribute}"))
        if "items" in code:
            held = dict(result)
            items = [(self.decode(k, None, path), v) for k, v in code["items"]]
            dict.clear(result)
            dict.update(result, {k: self.decode(v, held.get(k), f"{path}[{k!r}]") for k, v in items})
        return result

    def _module(self, code: Mapping[str, Any], there: Any, path: str) -> nn.Module:
        state = {name: self._kind_of_tensor(value, path) for name, value in code["state"].items()}
        for candidate in (there, *self._templates()):
            if candidate is None or name_of(type(candidate)) != code["class"]:
                continue
            module: nn.Module = candidate if candidate is there else deepcopy(candidate)
            try:
                module.load_state_dict(state)  # which alone can tell: a multi-head model takes up other tasks
                load_module_numbers(module, code["numbers"], path)
            except (RuntimeError, StateError, KeyError):  # another one of the same class
                continue
            return module
        raise StateError(f"{path} was a {code['class']}, and nothing here is like it")

    def _kind_of_tensor(self, code: Any, path: str) -> Tensor:
        tag = next(iter(code))
        return self.tensor(code[tag], None, path).detach()


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Attributes of an object; None for one that is no plain object.

    As pickling would keep them where its class says so (``__getstate__``), and without those whose names its class
    attribute ``not_saved`` holds.
    """
    own = getattr(type(value), "__getstate__", None)
    pickles = own is not None and own is not getattr(object, "__getstate__", None)
    held = value.__getstate__() if pickles else _all_attributes(value)
    if not isinstance(held, dict):
        return None
    skipped = getattr(type(value), "not_saved", ())
    return {name: item for name, item in held.items() if name not in skipped}


def _all_attributes(value: Any) -> dict[str, Any] | None:
    """Attributes and slots of an object; None for one that has neither."""
    slots = [slot for kind in type(value).__mro__ for slot in _listed(vars(kind).get("__slots__", ()))]
    if not hasattr(value, "__dict__") and not slots:
        return None
    held = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot) and slot != "__weakref__"}
    return held | getattr(value, "__dict__", {})


def object_without_init(kind: Any) -> Any:
    """An object of a class none of whose code was run; of a ``dict``, an empty one."""
    return dict.__new__(kind) if issubclass(kind, dict) else object.__new__(kind)


def module_numbers(module: nn.Module) -> Iterator[tuple[str, bool | int | float]]:
    """Numbers that a module and those in it hold as attributes, by path: a counter beside the buffers is state too."""
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if type(value) in (bool, int, float) and not name.startswith("_"):
                yield f"{path}.{name}".lstrip("."), value


def load_module_numbers(module: nn.Module, numbers: Mapping[str, Any], path: str) -> None:
    """Give a module the numbers that :func:`module_numbers` found."""
    for name, value in numbers.items():
        inside, _, attribute = name.rpartition(".")
        try:
            setattr(module.get_submodule(inside), attribute, value)
        except AttributeError as error:
            raise StateError(f"{path}: module {inside!r} is not there") from error


def _listed(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _in_order(value: Any) -> list[Any]:
    """Items of a container; of a set sorted, where they can be: the same state is the same text."""
    if not isinstance(value, (set, frozenset)):
        return list(value)
    try:
        return sorted(value)
    except TypeError:
        return sorted(value, key=repr)


def _given_name(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{name_of(type(value))}.{value.name}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return name_of(type(value)) if name is None else f"{getattr(value, '__module__', '')}.{name}"


_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", defaultdict: "default"}


def _container_decoder(kind: type) -> Callable[..., Any]:
    return lambda decoder, items, there, path: decoder._container(kind, items, there, path)


def _mapping_decoder(kind: type) -> Callable[..., Any]:
    return lambda decoder, items, there, path: decoder._mapping(kind, items, there, path)


def _generator(decoder: Decoder, code: Any, there: Any, path: str) -> torch.Generator:
    result = torch.Generator(code[0])
    result.set_state(decoder.tensor(code[1]["tensor"]).cpu())
    return result


_DECODE: dict[str, Callable[..., Any]] = {
    **{tag: _container_decoder(kind) for kind, tag in _CONTAINERS.items()},
    **{tag: _mapping_decoder(kind) for kind, tag in _MAPPINGS.items()},
    "tensor": Decoder.tensor,
    "parameter": Decoder._parameter,
    "known": Decoder._known_object,
    "same": Decoder._same,
    "given": Decoder._given,
    "float": lambda decoder, text, there, path: float(text),
    "bytes": lambda decoder, text, there, path: base64.b64decode(text),
    "dtype": lambda decoder, name, there, path: getattr(torch, name),
    "device": lambda decoder, name, there, path: torch.device(name),
    "number": lambda decoder, code, there, path: np.dtype(code[0]).type(code[1]),
    "array": lambda decoder, code, there, path: decoder.tensor(code["tensor"]).numpy(),
    "path": lambda decoder, text, there, path: Path(text),
    "generator": _generator,
}
