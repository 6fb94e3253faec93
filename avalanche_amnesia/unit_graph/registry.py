"""Rules of operations, registered by decorator.

A rule is called with the walk, the node, and what is known of the node's arguments: a
:class:`~avalanche_amnesia.unit_graph.values.Value`, a :class:`~avalanche_amnesia.unit_graph.values.ParameterValue`, a
:class:`~avalanche_amnesia.unit_graph.values.Constant`, or whatever the graph holds beside tensors. It returns what is
known of the result, or raises :class:`~avalanche_amnesia.unit_graph.findings.Unsupported`.
"""

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

Rule = Callable[..., Any]

RULES: dict[Any, Rule] = {}
"""Of operations on values, by overload (``torch.ops.aten.add.Tensor``) or by all overloads (``torch.ops.aten.add``)."""
DERIVATIONS: dict[Any, Rule] = {}
"""The same for operations on parameters only."""
NEEDS_ZEROS: set[Rule] = set()


def rule(*targets: Any, zeros: bool = False) -> Callable[[Rule], Rule]:
    """Register what operations do to units.

    Args:
        targets: operations of torch, with or without the name of an overload; any registered operator will do.
        zeros: whether the rule wants masked entries of its inputs to be exactly zero.

    Raises:
        TypeError: for what are no operations of torch as an exported graph has them, or no function.
    """
    _check(targets)

    def registering(function: Rule) -> Rule:
        register(RULES, *targets)(function)
        if zeros:
            NEEDS_ZEROS.add(function)
        return function

    return registering


def register(rules: dict[Any, Rule], *targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule of operations in a table."""

    def registering(function: Rule) -> Rule:
        if not callable(function):
            raise TypeError(f"a rule is a function (walk, node, *values), got {function!r}")
        rules.update(dict.fromkeys(targets, function))
        return function

    return registering


def derives(*targets: Any) -> Callable[[Rule], Rule]:
    """Register what operations make of parameters only: which entries stand behind each entry of the result."""
    _check(targets)
    return register(DERIVATIONS, *targets)


def _check(targets: tuple[Any, ...]) -> None:
    wrong = [target for target in targets if not isinstance(target, (OpOverload, OpOverloadPacket))]
    if wrong or not targets:
        given = f"got {wrong[0]!r}" if wrong else "got none"
        raise TypeError(f"a rule is for operations in an exported graph, such as torch.ops.aten.relu, {given}")


def registered(rules: dict[Any, Rule], target: Any) -> Rule | None:
    """The rule of an operation."""
    return rules.get(target) or rules.get(getattr(target, "overloadpacket", None))
