"""Pass over a backbone's traced graph: find the units that each tensor depends on, by rules, and insert masks.

Each weighted layer gets its own units. Its mask multiplies its output directly, or is folded into the norm that
follows. Each operation has a rule (see :mod:`~avalanche_amnesia.unit_graph.rules`) that returns the units of
its result. An operation without a rule reads no entry that other tasks change, and its result is always in use: that
protects more than necessary and never less. A part that can't be masked is reported as a
:class:`~avalanche_amnesia.unit_graph.findings.Finding`.

A rule, registered by decorator, is called with the walk, the node, and the knowledge about the node's arguments: a
:class:`~avalanche_amnesia.unit_graph.values.Value`, a :class:`~avalanche_amnesia.unit_graph.values.ParameterValue`, a
tensor that depends on neither the input nor a parameter, or any other graph argument. It returns the knowledge of
the result, or raises :class:`~avalanche_amnesia.unit_graph.findings.Unsupported`.
"""

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload, OpOverloadPacket

from avalanche_amnesia.unit_graph.declared_calls import DECLARED
from avalanche_amnesia.unit_graph.exporting import EXPORTED_BATCH, Exported, advice_to_declare, describe, module_of
from avalanche_amnesia.unit_graph.findings import Finding, Unsupported
from avalanche_amnesia.unit_graph.graph import Draft
from avalanche_amnesia.unit_graph.masking import MaskNodes, apply_mask, owned_parameter, tensor_in
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec
from avalanche_amnesia.unit_graph.values import (
    Dependence,
    Masked,
    ParameterValue,
    Value,
    always_in_use,
    compact,
    leaves,
    map_leaves,
)

Rule = Callable[..., Any]

RULES: dict[Any, Rule] = {}
"""Rules on tensors computed from the input, by overload (``aten.add.Tensor``) or by all overloads (``aten.add``)."""
DERIVATIONS: dict[Any, Rule] = {}
"""Rules for operations on parameters only, by overload or by all overloads; they return a ParameterValue."""
NEEDS_ZEROS: set[Rule] = set()
NORMS_BY_CHANNEL = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
"""Norms of single channels, which can absorb the mask of their input."""


def rule(*targets: Any, zeros: bool = False) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function to trace units through the operations ``targets`` on activations.

    Args:
        targets: operations of torch, with or without the name of an overload; any registered operator will do.
        zeros: True if the rule needs the masked entries of its inputs to be exactly zero.

    Raises:
        TypeError: if a target is not an operation of an exported graph, or the rule is not a function.
    """
    return _registering(RULES, targets, zeros)


def derives(*targets: Any) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a tracing rule for operations with parameters but without activations."""
    return _registering(DERIVATIONS, targets)


def _registering(rules: dict[Any, Rule], targets: tuple[Any, ...], zeros: bool = False) -> Callable[[Rule], Rule]:
    """Return a decorator that stores a function in the table ``rules`` as the rule of the operations ``targets``."""
    wrong = [target for target in targets if not isinstance(target, (OpOverload, OpOverloadPacket))]
    if wrong or not targets:
        given = f"got {wrong[0]!r}" if wrong else "got none"
        raise TypeError(f"a rule is for operations in an exported graph, such as torch.ops.aten.relu, {given}")

    def register(function: Rule) -> Rule:
        if not callable(function):
            raise TypeError(f"a rule is a function (walk, node, *values), got {function!r}")
        rules.update(dict.fromkeys(targets, function))
        if zeros:
            NEEDS_ZEROS.add(function)
        return function

    return register


def rule_of(rules: dict[Any, Rule], target: Any) -> Rule | None:
    """Return the rule in the table ``rules`` for an operation or for all its overloads, or None if there is none."""
    return rules.get(target) or rules.get(getattr(target, "overloadpacket", None))


class Walk:
    """One pass over a backbone's graph, in training or evaluation mode: traces units by rules, and inserts masks."""

    def __init__(
        self,
        backbone: nn.Module,
        exported: Exported,
        draft: Draft,
        training: bool,
        owned: Collection[str],
        frozen: Collection[str],
        norm: str,
    ) -> None:
        self.backbone, self.exported, self.graph, self.draft = backbone, exported, exported.graph, draft
        self.training, self.owned, self.frozen, self.norm = training, set(owned), set(frozen), norm
        self.parameters = dict(backbone.named_parameters(remove_duplicate=False))
        self.buffers = dict(backbone.named_buffers(remove_duplicate=False))
        self.values: dict[fx.Node, Any] = {}
        self._masked: dict[fx.Node, fx.Node] = {}

    def run(self) -> Tensor | None:
        """Apply the rules to all nodes; return each feature's unit-set id, ``(features,)``, or None if a rule fails."""
        places = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in places:
            self.values[node] = always_in_use(self.result(node))
        last = max(places, default=None)
        with self.graph.inserting_after(last):
            # Task-owned modules are one more input after the backbone's, because a graph starts with its inputs.
            self.tasks_own = self.graph.placeholder("own")
        self.masks = MaskNodes(self.graph, self.draft, self.tasks_own)
        for node in list(self.graph.nodes):
            if node in self.values or node.op in ("placeholder", "output") or node.target is dict:
                continue
            try:
                self.values[node] = self._node_result(node)
            except Unsupported as error:
                # Continue with a result that is always in use, so that one walk collects all findings.
                self._report(describe(node), error.reason, error.fix)
            except (AttributeError, TypeError, IndexError, ValueError, RuntimeError, AssertionError, KeyError) as error:
                self._report(describe(node), f"its masking rule can't take these arguments ({error})", _OTHER_FIX)
                return None
            if node not in self.values:
                try:
                    self.values[node] = _always_in_use(self.result(node))
                except Unsupported:
                    return None
        output = next(node for node in self.graph.nodes if node.op == "output")
        try:
            result = self._check_output(output)
        except Unsupported as error:
            self._report("output", error.reason, error.fix)
            return None
        # Keep unread inputs: they belong to the backbone's signature.
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        self.graph.lint()
        return result

    # One node -------------------------------------------------------------------------------------------------

    def _node_result(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute_value(node)
        args, kwargs = self.arguments(node)
        known = leaves((args, kwargs))
        if node.target in (operator.getitem, tensor_in) and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        values = any(isinstance(leaf, Value) for leaf in known)
        parameters = any(isinstance(leaf, ParameterValue) for leaf in known)
        # Values that depend on the input follow the operation's rule; values of parameters follow its derivation.
        # All other values are constant and computed here.
        if not self.training and _draws(node) and rule_of(RULES, node.target) is None:
            # In training random numbers are allowed, as in dropout, because the task's seed sets them.
            raise Unsupported("it draws random numbers in evaluation mode too", _DRAW_FIX)
        if node.target is DECLARED:
            found: Rule | None = RULES[DECLARED]
        elif not isinstance(result := self.result(node), (Tensor, tuple, list)):
            return result  # a size, or another number
        elif values:
            found = rule_of(RULES, node.target)
        elif parameters:
            learning = any(leaf.parts for leaf in known if isinstance(leaf, ParameterValue))
            derive = rule_of(DERIVATIONS, node.target) if learning else None
            return (derive or all_of_all)(self, node, *args, **kwargs)
        else:
            return self._constant(node, args, kwargs)
        if found in NEEDS_ZEROS:
            self._check_axes(node)
            self.zero_inputs(node)
            args, kwargs = self.arguments(node)
        # A missing rule is no error: a value always in use is protected more than necessary, never less.
        value = self.conservative(node) if found is None else found(self, node, *args, **kwargs)
        if isinstance(value, Value) and value.masked is Masked.DIRTY and not self._norm_follows(node, value):
            # Invariant: no operation reads masked entries that other tasks' parameters can change. All readers except
            # the mask itself, which would otherwise read its own result.
            here = self._masked_node(node, value)
            node.replace_all_uses_with(here, delete_user_cb=lambda user: user is not here)
        return value

    def _attribute_value(self, node: fx.Node) -> Any:
        name = str(node.target)
        if name in self.owned and name in self.parameters:
            self.draft.owned.setdefault(name, OwnedSpec(name))
            own = self.insert_behind(node, owned_parameter, (self.tasks_own, name))
            node.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
            self.values[own] = self.parameter_value(name, owned=True)
            return self.values[own]
        if name in self.parameters:
            return self.parameter_value(name)
        if name in self.draft.indices:
            return self.draft.indices[name].detach().cpu()
        return self.buffers[name].detach().cpu()

    def _constant(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Compute an operation on constants once, now; a random result is not computed and counts as always in use."""
        target: Any = node.target
        if _draws(node) or "empty" in str(target):
            return _always_in_use(self.result(node))
        kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
        try:
            return target(*args, **kwargs)
        except Exception as error:  # the operation may raise any exception
            raise Unsupported(
                f"it can't be worked out in advance ({error})", "compute it outside of forward"
            ) from error

    def is_frozen(self, parameter: str) -> bool:
        """Return True if a parameter or module is declared frozen, directly or through its parent."""
        parts = parameter.split(".")
        return any(".".join(parts[:length]) in self.frozen for length in range(1, len(parts) + 1))

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a node's positional and keyword arguments, with each input node replaced by its known value."""
        look_up = self.values.__getitem__
        return fx.node.map_arg(node.args, look_up), fx.node.map_arg(node.kwargs, look_up)

    def conservative(self, node: fx.Node) -> Any:
        """Handle an operation that has no rule: mask its inputs, and count its result as used by every task."""
        given = [leaf for leaf in leaves(self.arguments(node)) if isinstance(leaf, ParameterValue)]
        if not all(parameter.fixed for parameter in given):
            names = sorted({name for parameter in given for name in parameter.names})
            raise Unsupported(
                f"it is given parameters {names}, and has no masking rule for them", advice_to_declare(module_of(node))
            )
        for parameter in given:
            # Set 0 is ``ALWAYS``: these entries count as in use under every mask, and only the first task trains them.
            self.draft.record(parameter, torch.zeros((1,) * len(parameter.shape), dtype=torch.long))
        self.zero_inputs(node, dirty_only=True)
        return _always_in_use(self.result(node))

    def result(self, node: fx.Node) -> Any:
        """Return a graph node's outputs as meta tensors (shape and dtype only), for a mini-batch of fixed size."""
        try:
            return map_leaves(node.meta["val"], self._as_meta)
        except ValueError as error:
            raise Unsupported(
                f"its result has no shape that could be known in advance ({error})", _SHAPE_FIX
            ) from error

    def _as_meta(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            shape = [self.exported.size(size, EXPORTED_BATCH) for size in leaf.shape]
            return torch.empty(shape, dtype=leaf.dtype, device="meta")
        return self.exported.size(leaf, EXPORTED_BATCH)

    def value(self, x: Any) -> Value:
        """Return ``x`` as a Value; a constant tensor counts as always in use, and a parameter raises Unsupported."""
        if isinstance(x, Tensor):
            return always_in_use(x)
        if not isinstance(x, Value):
            raise Unsupported(
                "it is given a parameter, not something computed from the input",
                "declare the parameter frozen=[…], the module around it task_owned=[…], or leave it out",
            )
        return x

    def parameter_value(self, name: str, owned: bool = False) -> ParameterValue:
        """Return a backbone parameter as a traced tensor; ``owned``: whether each task has its own copy of it."""
        parameter = self.parameters[name]
        if not parameter.requires_grad and not owned:
            return ParameterValue(parameter.shape, ())
        part = Dependence(name, parameter.shape, frozen=self.is_frozen(name), owned=owned)
        return ParameterValue(parameter.shape, (part,))

    def insert_behind(self, node: fx.Node, function: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """Insert a call of ``function`` after a node, and copy the node's shape and source location to the call."""
        with self.graph.inserting_after(node):
            made = self.graph.call_function(function, args, kwargs or {})
        made.meta = dict(node.meta)
        return made

    def zero_inputs(self, node: fx.Node, *, dirty_only: bool = False) -> None:
        """Insert masks that zero the masked entries of a node's inputs; ``dirty_only``: constant entries may stay."""
        for source in list(node.all_input_nodes):
            value = self.values.get(source)
            # Constant masked entries (one half after a sigmoid) hold no other task's data: only some rules need zeros.
            least = Masked.CONSTANT if dirty_only else Masked.ZERO
            if isinstance(value, Value) and value.masked > least and not value.always:
                node.replace_input_with(source, self._masked_node(source, value))

    def follows_batch(self, node: fx.Node, dim: int) -> bool:
        """Return True if the size of a node's dimension ``dim`` depends on the number of samples."""
        size, batches = node.meta["val"].shape[dim], (EXPORTED_BATCH, EXPORTED_BATCH + 1)
        return bool(self.exported.batch) and len({self.exported.size(size, batch) for batch in batches}) > 1

    def _check_axes(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if isinstance(value := self.values.get(source), Value):
                self._check_axis(source, value)

    def _check_axis(self, node: fx.Node, value: Value) -> None:
        """Raise Unsupported if units lie along an axis whose length depends on the batch size."""
        if any(size > 1 and self.follows_batch(node, dim) for dim, size in enumerate(compact(value.ids).shape)):
            raise Unsupported(
                "units and samples lie on one axis, so that a mask would hold only for one size of batch",
                "keep the samples on an axis of their own (x.reshape(x.shape[0], -1, …))",
            )

    def _masked_node(self, node: fx.Node, value: Value) -> fx.Node:
        if node not in self._masked:
            self._check_axis(node, value)
            # All readers of a value share one masked copy; masking changes no sets.
            here = self.insert_behind(node, apply_mask, (node, self.masks.emit(value.ids)))
            self._masked[node] = here
            self.values[here] = value.like(masked=Masked.ZERO)
        return self._masked[node]

    def _norm_follows(self, node: fx.Node, value: Value) -> bool:
        """Return True if a node's only user is a batch or instance norm, which can apply the node's mask instead."""
        if len(node.users) != 1:
            return False
        others = [size for dim, size in enumerate(compact(value.ids).shape) if dim != 1]
        if any(size > 1 for size in others):  # the units of one channel of the norm are masked separately
            return False
        user = next(iter(node.users))
        return user.target in NORMS_BY_CHANNEL and user.args[0] is node

    def _check_output(self, node: fx.Node) -> Tensor:
        result = self.values.get(node.args[0]) if isinstance(node.args[0], fx.Node) else node.args[0]
        if not isinstance(result, Value):
            raise Unsupported(f"the backbone returns a {type(result).__name__}", "return one tensor of features")
        if not self.draft.layers:
            raise Unsupported(
                "the backbone has no weighted layer to mask",
                "use a Linear or a Conv whose weight has gradients; where only heads learn, MultiHeadModel(backbone)",
            )
        if result.ids.dim() != 2:
            raise Unsupported(
                f"the backbone returns values of shape (batch, {', '.join(map(str, result.ids.shape[1:]))})",
                "flatten or average them into (batch, features)",
            )
        if len(result.ids) != EXPORTED_BATCH:
            raise Unsupported("the backbone changes the first dimension of its input", "keep the batch there")
        if self.follows_batch(node.all_input_nodes[0], 1):
            raise Unsupported("the number of features depends on the size of the batch", "keep samples apart")
        self._check_axes(node)
        self.zero_inputs(node)
        return self.draft.sets.union_along(result.ids, [0]).clone()

    def _report(self, where: str, reason: str, fix: str) -> None:
        finding = Finding(f"{where} of {type(self.backbone).__name__}", reason, fix)
        if finding not in self.draft.findings:
            self.draft.findings.append(finding)


_OTHER_FIX = "write it in another way, or declare the module around it frozen=[…] or task_owned=[…]"
_DRAW_FIX = "draw only in training (if self.training: …), or use nn.Dropout"
_SHAPE_FIX = "write it with operations whose shapes do not depend on the data"


def all_of_all(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Trace an operation on parameters that has no rule: each entry depends on all entries of all operands."""
    operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, ParameterValue)]

    def one(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        parts: list[Dependence] = []
        for operand in operands:
            mixed = operand.combine_entries(torch.zeros((1,) * len(operand.shape), dtype=torch.long), ())
            parts += mixed.move_entries(lambda place: place.expand(result.shape)).parts
        return ParameterValue(result.shape, tuple(parts))

    return map_leaves(walk.result(node), one)


def _draws(node: fx.Node) -> bool:
    """Return True if an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _always_in_use(result: Any) -> Any:
    return map_leaves(result, lambda leaf: always_in_use(leaf) if isinstance(leaf, Tensor) else leaf)
