"""One walk over a backbone's graph: sets of units forward, masks in.

Every weighted layer gets units of its own; its mask is multiplied in right behind it, or folded into the norm that
follows. Each operation has a rule (see :mod:`~avalanche_amnesia.models.rules`) that says which units stand behind its
result. A function of torch without parameters needs none: its result simply counts as always in use, which protects
more than necessary and never less. Whatever else has no rule is a :class:`~avalanche_amnesia.models.findings.Finding`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.models.book import Book
from avalanche_amnesia.models.dry_run import dry_run_node
from avalanche_amnesia.models.findings import Finding, Refused
from avalanche_amnesia.models.in_place import InPlace
from avalanche_amnesia.models.mask_nodes import MaskNodes
from avalanche_amnesia.models.masking import masked, owned_parameter
from avalanche_amnesia.models.registry import (
    NEEDS_ZEROS,
    NORMS_BY_CHANNEL,
    RULES,
    Fallback,
    Rule,
    module_rule,
)
from avalanche_amnesia.models.task_owned import OwnedSpec
from avalanche_amnesia.models.trees import leaves, map_leaves
from avalanche_amnesia.models.units import compact
from avalanche_amnesia.models.values import Masked, ParameterValue, Value, always_in_use


class Walk:
    """One walk.

    Args:
        backbone: whose modules and parameters the graph names.
        graph: its trace; rewritten in place.
        book: receives layers, parameter uses and findings.
        owned: names of modules and parameters declared task-owned; such modules stay whole.
        frozen: names of modules and parameters declared frozen.
        classifier: name of the backbone's own classifier, which is left out.
        norm: ``task`` or ``batch``.
    """

    def __init__(
        self,
        backbone: nn.Module,
        graph: fx.Graph,
        book: Book,
        *,
        owned: Collection[str] = (),
        frozen: Collection[str] = (),
        classifier: str | None = None,
        norm: str = "task",
    ) -> None:
        self.backbone, self.graph, self.book = backbone, graph, book
        self.owned_modules, self.frozen, self.classifier, self.norm = set(owned), set(frozen), classifier, norm
        self.modules = dict(backbone.named_modules(remove_duplicate=False))
        self.parameters = dict(backbone.named_parameters(remove_duplicate=False))
        self.buffers = dict(backbone.named_buffers(remove_duplicate=False))
        self.values: dict[fx.Node, Any] = {}
        self._masked: dict[fx.Node, fx.Node] = {}
        self._in_place = InPlace(self.modules)

    def run(self, inputs: Value) -> Tensor | None:
        """Walk; the sets behind the features, ``(features,)``, or None where findings stand in the way."""
        self._clean()
        places = [node for node in self.graph.nodes if node.op == "placeholder"]
        for extra in places[1:]:
            if extra.users:
                names = [node.name for node in places]
                self._find("forward", f"it takes {len(places)} inputs {names}", "one tensor is allowed")
                return None
            self.graph.erase_node(extra)
        self.values[places[0]] = inputs
        self._batch = len(inputs.ids)
        with self.graph.inserting_after(places[0]):
            self.tasks_own = self.graph.placeholder("own")
        self.masks = MaskNodes(self.graph, self.book, self.tasks_own)
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            try:
                self.values[node] = self._value_of(node)
            except (AttributeError, TypeError, IndexError, RuntimeError, AssertionError) as error:
                self._find(_where(node), f"its masking rule can't take these arguments ({error})", _OTHER_MEND)
                return None
            except Refused as refused:
                self._find(_where(node), refused.reason, refused.mend)
                stand_in = self._stand_in(node)
                if stand_in is None:
                    return None
                self.values[node] = stand_in
        output = next(node for node in self.graph.nodes if node.op == "output")
        try:
            result = self._output(output)
        except Refused as refused:
            self._find("output", refused.reason, refused.mend)
            return None
        self._sweep()
        self.graph.lint()
        return result

    def _clean(self) -> None:
        """Take out what does nothing, so that a layer and its norm stand side by side."""
        for node in list(self.graph.nodes):
            nothing = node.op == "call_module" and type(self.modules.get(str(node.target))) is nn.Identity
            if nothing or (node.op == "call_module" and node.target == self.classifier):
                node.replace_all_uses_with(node.args[0])
            checks = node.op == "call_function" and node.target is torch._assert
            if nothing or checks or (node.op == "call_module" and node.target == self.classifier):
                self.graph.erase_node(node)
        self._sweep()

    def _sweep(self) -> None:
        """Take out what nobody reads."""
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.op not in ("placeholder", "output") and not self._in_place.writes(node):
                self.graph.erase_node(node)

    # One node -------------------------------------------------------------------------------------------------

    def _value_of(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(node)
        found = self._rule_of(node)
        if found in NEEDS_ZEROS:
            self.zero_inputs(node)
        self._in_place.check(node, self.values)
        if found is None:
            value = self.anything(node)
        else:
            args, kwargs = self.arguments(node)
            value = found(self, node, *args, **kwargs)
        if isinstance(value, Value) and value.masked is Masked.DIRTY and not self._norm_follows(node, value):
            return self._mask_behind(node, value)
        return value

    def _rule_of(self, node: fx.Node) -> Rule | None:
        if node.op == "call_module":
            name = str(node.target)
            if name in self.owned_modules or name in self.frozen:
                return RULES[Fallback.DECLARED_MODULE]
            return module_rule(self.modules[name]) or RULES[Fallback.UNKNOWN_MODULE]
        args, kwargs = self.arguments(node)
        if not any(isinstance(leaf, (Value, ParameterValue)) for leaf in leaves((args, kwargs))):
            return RULES[Fallback.CONSTANT]
        return RULES.get(node.target)

    def _attribute(self, node: fx.Node) -> Any:
        name = str(node.target)
        if name in self.parameters:
            return self._owned_parameter(node, name) if name in self.owned_modules else self.whole(name)
        if name in self.book.indices:
            return self.book.indices[name].detach().cpu()
        if name in self.buffers:
            return self.buffers[name].detach().cpu()
        value = operator.attrgetter(name)(self.backbone)
        return value.detach().cpu() if isinstance(value, Tensor) else value

    def _owned_parameter(self, node: fx.Node, name: str) -> ParameterValue:
        self.book.owned.setdefault(name, OwnedSpec(name))
        with self.graph.inserting_after(node):
            own = self.graph.call_function(owned_parameter, (self.tasks_own, name))
        node.replace_all_uses_with(own)
        whole = self.whole(name)
        self.values[own] = ParameterValue(name, whole.index, whole.dtype, owned=True)
        return self.values[own]

    def is_frozen(self, parameter: str) -> bool:
        """Whether a parameter or module is declared frozen, itself or by what it lies in."""
        parts = parameter.split(".")
        return any(".".join(parts[:length]) in self.frozen for length in range(1, len(parts) + 1))

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What is known of a node's arguments."""
        look_up = self.values.__getitem__
        return fx.node.map_arg(node.args, look_up), fx.node.map_arg(node.kwargs, look_up)

    def anything(self, node: fx.Node) -> Any:
        """A function of torch without a rule of its own: its result counts as always in use.

        Raises:
            Refused: for a function that may hide parameters or memory, or that is given a parameter.
        """
        name = getattr(node.target, "__name__", str(node.target))
        args, kwargs = self.arguments(node)
        parameters = [leaf.name for leaf in leaves((args, kwargs)) if isinstance(leaf, ParameterValue)]
        if parameters:
            raise Refused(
                f"operation {name!r} on parameters {parameters} has no masking rule",
                "use them through a layer of torch.nn, or declare them frozen=[…]",
            )
        if node.op == "call_function" and not _is_of_torch(node.target):
            raise Refused(f"function {name!r} has no masking rule", "write it with torch's functions and layers")
        if self._in_place.writes(node):
            raise Refused(f"operation {name!r} writes in place", "use its result instead: the same without '_'")
        self.zero_inputs(node, dirty_only=True)
        return _as_always(self.run_on_meta(node))

    def run_on_meta(self, node: fx.Node) -> Any:
        """What the node returns, as tensors of shape and type alone.

        Raises:
            Refused: where that depends on values.
        """
        args, kwargs = map_leaves(self.arguments(node), _shape_alone)
        try:
            return dry_run_node(node, self.module(node) if node.op == "call_module" else None, args, kwargs)
        except Exception as error:  # whatever the operation raises
            raise Refused(f"its result has no shape that could be known in advance ({error})", _SHAPE_MEND) from error

    def _stand_in(self, node: fx.Node) -> Any:
        try:
            return _as_always(self.run_on_meta(node))
        except Refused:
            return None

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a node calls."""
        return self.modules[str(node.target)]

    def value(self, x: Any) -> Value:
        """What a layer reads, as a value.

        Raises:
            Refused: for a parameter: a layer of parameters is a parameter of its own.
        """
        if isinstance(x, Tensor):
            return always_in_use(x.shape, x.dtype)
        if not isinstance(x, Value):
            raise Refused(
                "it is given a parameter, not something computed from the input",
                "declare the parameter frozen=[…], the module around it task_owned=[…], or leave it out",
            )
        return x

    def whole(self, name: str) -> ParameterValue:
        """A parameter of the backbone as a value."""
        parameter = self.parameters[name]
        index = torch.arange(parameter.numel()).reshape(parameter.shape)
        return ParameterValue(name, index, parameter.dtype, self.is_frozen(name))

    def used(self, parameter: ParameterValue, *factors: Tensor) -> None:
        """Note the use of a parameter, see :meth:`Book.use`."""
        self.book.use(parameter, self.parameters[parameter.name].shape, *factors)

    # Masks ----------------------------------------------------------------------------------------------------

    def zero_inputs(self, node: fx.Node, *, dirty_only: bool = False) -> None:
        """Make the masked entries of a node's inputs exactly zero."""
        for source in list(node.all_input_nodes):
            value = self.values.get(source)
            least = Masked.CONSTANT if dirty_only else Masked.ZERO
            if isinstance(value, Value) and value.masked > least and not value.always:
                node.replace_input_with(source, self._masked_node(source, value))

    def _masked_node(self, node: fx.Node, value: Value) -> fx.Node:
        if node not in self._masked:
            with self.graph.inserting_after(node):
                here = self.graph.call_function(masked, (node, self.masks.emit(value.ids)))
            self._masked[node] = here
            self.values[here] = value.like(masked=Masked.ZERO)
        return self._masked[node]

    def _mask_behind(self, node: fx.Node, value: Value) -> Value:
        here = self._masked_node(node, value)
        node.replace_all_uses_with(here, delete_user_cb=lambda user: user is not here)
        return value

    def _norm_follows(self, node: fx.Node, value: Value) -> bool:
        """Whether the only reader is a norm of single channels, into which the mask can be folded."""
        if len(node.users) != 1:
            return False
        others = [size for dim, size in enumerate(compact(value.ids).shape) if dim != 1]
        if any(size > 1 for size in others):  # the units of one channel of the norm are not all masked together
            return False
        user = next(iter(node.users))
        if not user.args or user.args[0] is not node:
            return False
        if user.op == "call_module":
            kinds = type(self.modules[str(user.target)]).__mro__
            return any(kind in NORMS_BY_CHANNEL for kind in kinds)
        return user.target in NORMS_BY_CHANNEL

    # Small parts ----------------------------------------------------------------------------------------------

    def _output(self, node: fx.Node) -> Tensor:
        result = self.values.get(node.args[0]) if isinstance(node.args[0], fx.Node) else node.args[0]
        if not isinstance(result, Value):
            raise Refused(f"the backbone returns a {type(result).__name__}", "return one tensor of features")
        if not self.book.layers:
            raise Refused("the backbone has no weighted layer to mask", "use a Linear or a Conv")
        if result.ids.dim() != 2:
            raise Refused(
                f"the backbone returns values of shape (batch, {', '.join(map(str, result.ids.shape[1:]))})",
                "flatten or average them into (batch, features)",
            )
        if len(result.ids) != self._batch:
            raise Refused("the backbone's result has another first dimension than its input", "keep the batch there")
        self.zero_inputs(node)
        return self.book.sets.over(result.ids, [0]).clone()

    def _find(self, where: str, reason: str, mend: str) -> None:
        finding = Finding(f"{where} of {type(self.backbone).__name__}", reason, mend)
        if finding not in self.book.findings:
            self.book.findings.append(finding)


_OTHER_MEND = "write it in another way, or declare the module around it frozen=[…] or task_owned=[…]"
_SHAPE_MEND = "write it with operations whose shapes do not depend on the data"


def _where(node: fx.Node) -> str:
    if node.op == "call_module":
        return f"module {str(node.target)!r}"
    line = node.stack_trace.strip().splitlines()[-1].strip() if node.stack_trace else ""
    return f"operation {node.name!r}" + (f" ({line})" if line else "")


def _is_of_torch(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    known = ("torch", "_operator", "operator", "math", "builtins")
    return module.split(".")[0] in known or type(target).__module__ == "builtins" or module.startswith("torch._C")


def _shape_alone(leaf: Any) -> Any:
    if isinstance(leaf, (Value, ParameterValue)):
        return leaf.meta()
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _as_always(result: Any) -> Any:
    return map_leaves(result, lambda v: always_in_use(v.shape, v.dtype) if isinstance(v, Tensor) else v)
