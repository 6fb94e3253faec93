"""Structure of a backbone as a key, so that two that are built alike need be traced once."""

import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from avalanche_amnesia.bits import tensor_hash

Result = TypeVar("Result")
_LARGEST = 1 << 22
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"} | {"training"}


class Known(Generic[Result]):
    """The latest results, by structure."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[Hashable, Result] = OrderedDict()

    def get(self, structure: Hashable | None) -> Result | None:
        """The result of a structure, if it is known."""
        if structure is None or structure not in self._held:
            return None
        self._held.move_to_end(structure)
        return self._held[structure]

    def put(self, structure: Hashable | None, result: Result) -> None:
        """Keep a result; the one that was not asked for the longest goes."""
        if structure is not None:
            self._held[structure] = result
            while len(self._held) > self._most:
                self._held.popitem(last=False)


def structure_of(backbone: nn.Module, options: Hashable) -> Hashable | None:
    """All that a trace may depend on: modules, their types and attributes, shapes and types of their tensors."""
    numbers: dict[int, int] = {}
    parts: list[Hashable] = [options, torch.get_default_dtype()]
    try:
        for name, module in backbone.named_modules(remove_duplicate=False):
            parts.append((name, type(module), _number(numbers, module)))
            for key, parameter in module._parameters.items():
                parts.append((key, None if parameter is None else (_kind(parameter), _number(numbers, parameter))))
            for key, buffer in module._buffers.items():
                statistic = isinstance(module, _NormBase) and key in _STATISTICS
                parts.append((key, None if buffer is None else _kind(buffer) if statistic else _content(buffer)))
            for key, value in vars(module).items():
                if key not in _OF_EVERY_MODULE:
                    parts.append((key, _attribute(value)))
    except _Hidden:
        return None
    return tuple(parts)


class _Hidden(Exception):
    """An attribute whose equality is not known."""


def _number(numbers: dict[int, int], thing: object) -> int:
    return numbers.setdefault(id(thing), len(numbers))


def _kind(tensor: Tensor) -> Hashable:
    return type(tensor), tuple(tensor.shape), tensor.dtype, str(tensor.device), tensor.requires_grad


def _content(tensor: Tensor) -> Hashable:
    """Numbers that a trace may read: forward may make indices of them."""
    if tensor.numel() > _LARGEST:
        raise _Hidden
    return (*_kind(tensor), tensor_hash(tensor))  # type: ignore[misc]


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


def _attribute(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_attribute, value))
    if isinstance(value, dict):
        return type(value), tuple((_attribute(key), _attribute(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_attribute, value))
    if isinstance(value, Tensor):
        return _content(value)
    if type(value) is functools.partial:  # vision transformers hold their kind of norm as one
        return type(value), *map(_attribute, (value.func, value.args, value.keywords))
    if isinstance(value, type) or (isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and _open(value)):
        return value
    raise _Hidden


def _open(function: Any) -> bool:
    """Tell whether a function reads nothing but its arguments and its module's names."""
    return getattr(function, "__closure__", None) is None
