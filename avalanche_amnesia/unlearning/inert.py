"""Plugins that hold nothing and write nothing: they can't carry anything from one task to another."""

from __future__ import annotations

import builtins
import dis
import logging
import types
from functools import lru_cache
from typing import Any

_PLAIN = (bool, int, float, str, bytes, type(None))
_WRITING = ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_DEREF", "DELETE_", "IMPORT_")
_FUNCTIONS = frozenset(
    (
        *("print", "len", "str", "int", "float", "bool", "repr", "format", "round", "sum", "min", "max", "abs"),
        *("sorted", "isinstance", "hasattr", "getattr", "type", "range", "enumerate", "zip", "list", "tuple", "dict"),
    )
)
_METHODS = frozenset(
    (
        *("item", "mean", "sum", "max", "min", "detach", "cpu", "tolist", "size", "dim", "numel"),
        *("items", "keys", "values", "get", "format", "join", "info", "debug", "warning", "error", "write", "flush"),
    )
)


def is_inert(plugin: object) -> bool:
    """Tell whether a plugin holds plain settings alone, and none of its methods writes anything but text.

    Read off its methods' bytecode, with a short list of functions and methods that they may call; what is not on it
    counts as writing.
    """
    held = list(getattr(plugin, "__dict__", {}).values())
    if not all(_is_plain(value) for value in held):
        return False
    own = [kind for kind in type(plugin).__mro__ if kind.__module__ not in _BASES]
    members = [(name, member) for kind in own for name, member in vars(kind).items() if name != "__init__"]
    return all(
        _writes_nothing(member)
        for name, member in members
        if isinstance(member, types.FunctionType) or not name.startswith(("__", "_abc_"))
    )


_BASES = ("avalanche.core", "builtins", "abc", "typing")
"""Modules of the host's base classes: its own plugins lie elsewhere, and are looked at like any other."""


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _writes_nothing(member: Any) -> bool:
    if not isinstance(member, types.FunctionType):
        return _is_plain(member)
    callables = calls = 0
    for step in _instructions(member.__code__):
        in_place = step.opname.startswith(("BINARY_OP", "INPLACE_")) and str(step.argrepr).endswith("=")
        if in_place or step.opname.startswith(_WRITING) or step.opname in ("MAKE_FUNCTION", "YIELD_VALUE"):
            return False
        method = step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and "NULL" in str(step.argrepr))
        if method and step.argval not in _METHODS:
            return False
        if step.opname == "LOAD_GLOBAL":
            value = member.__globals__.get(step.argval, getattr(builtins, str(step.argval), None))
            if callable(value) and (step.argval not in _FUNCTIONS or value is not getattr(builtins, step.argval)):
                return False
            if not callable(value) and not isinstance(value, (*_PLAIN, types.ModuleType, logging.Logger)):
                return False
            callables += callable(value)
        callables += method
        calls += step.opname.startswith("CALL") and step.opname != "CALL_INTRINSIC_1"
    return calls <= callables


@lru_cache(maxsize=1024)
def _instructions(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """The bytecode of a function, taken apart once: what its names stand for may change between two requests."""
    return tuple(dis.get_instructions(code))
