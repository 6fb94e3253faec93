"""Encode the state of a strategy as JSON and tensors, and decode it."""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.saving.files import Part, Parts
from avalanche_amnesia.saving.values import StateError


@dataclass(frozen=True)
class OwnFile:
    """A value in a state that is saved to a file of its own; later states reuse this file until the value changes."""

    value: Any  # contains no further ``OwnFile``


def encode(value: Any, path: str = "") -> tuple[Any, Parts]:
    """Split a state, without copies, into JSON values and ``{path in the state: tensors}``; each entry becomes a file.

    A value that JSON lacks becomes an object with one key that begins with ``$``: ``{"$tuple": […]}``. Other objects
    are not encoded, and decoding calls no function that a state names. An error lists the paths of unsupported values.
    """
    encoder = _Encoder()
    code = encoder.encode(value, path)
    if encoder.foreign:
        raise StateError(", ".join(encoder.foreign))
    return code, ({"state": Part(encoder.tensors)} if encoder.tensors else {}) | encoder.parts


class _Encoder:
    def __init__(self, inside: str | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts: Parts = {}
        self.foreign: list[str] = []
        self._inside = inside  # path of the part being encoded; None for the state itself

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and isfinite(value)):
            return value
        if kind is list:
            return [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
        if kind is dict:  # JSON keys are text, and a key with $ would be decoded as a special object
            pairs = [[self.encode(k, f"a key of {path}"), self.encode(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return {"$dict": pairs}
        if kind is OwnFile:
            inner = _Encoder(path)
            code = inner.encode(value.value, path)
            self.foreign += [*inner.foreign, *(f"{inside} lies apart in a part" for inside in inner.parts)]
            self.parts[path] = Part(inner.tensors, json.dumps(code, allow_nan=False))
            return {"$part": path}
        if kind is Tensor:
            name = path.removeprefix(self._inside or "")  # a part does not contain its own path
            self.tensors[name] = value.detach()
            return {"$tensor": [name, value.device.type]}
        kind = np.generic if isinstance(value, np.generic) else kind
        if kind in _SPECIAL and (kind not in _OF_NUMPY or _is_numeric(value.dtype)):
            name, plain, _ = _SPECIAL[kind]
            return {name: self.encode(plain(value), path)}
        self.foreign.append(f"{path} is a {type(value).__name__}")
        return None


def decode(code: Any, parts: Mapping[str, Part], device: torch.device | str = "cpu") -> Any:
    """Return the state that :func:`encode` encoded; raise StateError with the path of an invalid value."""
    return _Decoder(parts.get("state", {}), parts, device).decode(code, "")


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Part], device: torch.device | str) -> None:
        self._tensors, self._parts, self._device = tensors, parts, device

    def decode(self, code: Any, path: str) -> Any:
        if not isinstance(code, (dict, list)):
            return code
        if isinstance(code, list):
            return [self.decode(item, f"{path}[{i}]") for i, item in enumerate(code)]
        name = next(iter(code), "")
        if not name.startswith("$"):
            return {key: self.decode(item, f"{path}.{key}".lstrip(".")) for key, item in code.items()}
        try:
            return self._decode_special(name, code[name], path)
        except StateError:
            raise
        except Exception as error:  # a malformed file
            raise StateError(f"invalid value in state at {path or 'its beginning'}: {code!r:.200}") from error

    def _decode_special(self, name: str, code: Any, path: str) -> Any:
        if name == "$dict":
            pairs = [(self.decode(key, f"a key of {path}"), item) for key, item in code]
            return {key: self.decode(item, f"{path}[{key!r}]") for key, item in pairs}
        if name == "$tensor":
            place, device = code  # a tensor may be loaded onto a different device
            return self._tensors[place].to("cpu" if device == "cpu" else self._device)
        if name == "$part":
            part = self._parts[code]
            return _Decoder(part, {}, self._device).decode(json.loads(part.code), path)
        return _MAKE[name](self.decode(code, path))


def _sorted_items(values: Any) -> list[Any]:
    """Return the items of a set, sorted if possible, so that equal states have equal text."""
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found


def _numpy_number(state: Any) -> np.generic:
    dtype = np.dtype(state[0])
    if not _is_numeric(dtype):
        raise TypeError(dtype)
    return dtype.type(state[1])


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return True if a torch tensor can store numbers of a numpy type: all numbers except ``longdouble``."""
    return dtype.kind in "biuf" and dtype.type is not np.longdouble


_OF_NUMPY = (np.generic, np.ndarray)
_SPECIAL: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("$tuple", list, tuple),
    set: ("$set", _sorted_items, set),
    frozenset: ("$frozenset", _sorted_items, frozenset),
    float: ("$float", str, float),  # infinities and NaN, which JSON lacks
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch."), _torch_dtype),
    torch.device: ("$device", str, torch.device),
    torch.Generator: (
        "$generator",
        lambda value: [str(value.device), value.get_state()],
        lambda state: torch.Generator(state[0]).set_state(state[1].cpu()),
    ),
    np.generic: ("$number", lambda value: [str(value.dtype), value.item()], _numpy_number),
    np.ndarray: ("$array", lambda value: torch.from_numpy(np.asarray(value, order="C")), lambda made: made.numpy()),
}
"""Type → its name in JSON, its encoder and its decoder."""
_MAKE = {name: make for name, _, make in _SPECIAL.values()}
