"""What is known of functions, tensor methods and modules: a rule each, registered by decorator."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from torch import nn

Rule = Callable[..., Any]


class Fallback(Enum):
    """Cases that go by what a node is given, or what the user declared, in place of what it calls."""

    CONSTANT = auto()
    DECLARED_MODULE = auto()
    UNKNOWN_MODULE = auto()


RULES: dict[Any, Rule] = {}
MODULE_RULES: dict[type[nn.Module], Rule] = {}
NEEDS_ZEROS: set[Rule] = set()
NORMS_BY_CHANNEL: set[Any] = set()
"""Norms of single channels, into which the mask of what they read can be folded."""
MAY_RETURN_ITSELF: set[Any] = set()
"""Functions, methods and types of modules whose result may share its memory with their first argument."""


def rule(*targets: Any, zeros: bool = False, by_channel: bool = False) -> Callable[[Rule], Rule]:
    """Register what functions, methods (by name) or module types do to units.

    Args:
        targets: functions, names of tensor methods, types of modules, a :class:`Fallback`.
        zeros: whether the rule wants masked entries of its inputs to be exactly zero.
        by_channel: whether these are norms of single channels.
    """

    def register(function: Rule) -> Rule:
        for target in targets:
            if isinstance(target, type) and issubclass(target, nn.Module):
                MODULE_RULES[target] = function
            else:
                RULES[target] = function
        if zeros:
            NEEDS_ZEROS.add(function)
        if by_channel:
            NORMS_BY_CHANNEL.update(targets)
        return function

    return register


def module_rule(module: nn.Module) -> Rule | None:
    """The rule of a module's class or its nearest base, or of a class of that name: its library need not be there."""
    found = next((MODULE_RULES[base] for base in type(module).__mro__ if base in MODULE_RULES), None)
    return RULES.get(type(module).__name__) if found is None else found
