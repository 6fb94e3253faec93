"""One walk over a task's graph that writes the same network without its dead units.

Every class of operations that the unit graph knows (:mod:`avalanche_amnesia.models.rules`) may have a rule here that
says how it works on values of which some entries are left out. Whatever has none gets its inputs whole again, with
the entries that are left out put back, and runs as it was: always right, and the next layer with weights
reads the live entries alone.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from avalanche_amnesia.models.dry_run import call_node, dry_run_node
from avalanche_amnesia.models.extraction.layout import Live, Size, live, places_in
from avalanche_amnesia.models.extraction.overwriting import write_over
from avalanche_amnesia.models.extraction.parts import Parts
from avalanche_amnesia.models.registry import MODULE_RULES, RULES, Rule
from avalanche_amnesia.models.tracer import DROPS_BRANCHES
from avalanche_amnesia.models.trees import leaves, map_leaves

Shrink = Callable[..., Any]
SHRINKS: dict[Any, Shrink] = {}
BATCHES = (2, 3)
"""Shapes are followed for two sizes of batch: what differs depends on the batch."""


def shrinks(*kinds: Any) -> Callable[[Shrink], Shrink]:
    """Register how operations work on values of which entries are left out.

    The rule is called with the walk, the node, and the node's arguments; it returns NotImplemented where it can't do
    without the whole values.

    Args:
        kinds: rules of the unit graph (all operations of this rule), functions, or types of modules.
    """

    def register(function: Shrink) -> Shrink:
        SHRINKS.update(dict.fromkeys(kinds, function))
        return function

    return register


class Shrinking:
    """One walk.

    Args:
        root: whose modules and parameters the graph names.
        graph: from the input to the logits; not changed.
        input_shape: of one input, without the batch.
        dtype: of the input.
        fold: whether batch norms become part of the layers in front of them.

    Attributes:
        norms: batch and instance norms that were not folded: name → smaller copy, and the channels that it has.
        result: how the output lies, once the walk is over.
    """

    def __init__(
        self, root: nn.Module, graph: fx.Graph, input_shape: Sequence[int], dtype: torch.dtype, *, fold: bool = True
    ) -> None:
        self.root, self.old, self.new, self.fold = root, graph, fx.Graph(), fold
        self.norms: dict[str, tuple[nn.Module, Tensor]] = {}
        self.result: Any = None
        self.input = tuple(torch.empty((n, *input_shape), dtype=dtype, device="meta") for n in BATCHES)
        self.parts = Parts(self.new)
        self.known: dict[fx.Node, Any] = {}
        self.whole_again: dict[str, int] = {}
        self._brought: dict[Any, fx.Node] = {}

    @torch.no_grad()
    def run(self, *, whole: bool = True) -> fx.GraphModule:
        """Walk; the smaller network.

        Args:
            whole: whether it puts back what its output is left without. Where False, last entries of it may be left
                out that are zero.
        """
        for node in self.old.nodes:
            if node.op == "placeholder":
                self.known[node] = Live(self.new.placeholder("x"), self.input)  # type: ignore[arg-type]
            elif node.op == "output":
                result = self.known[node.args[0]]
                if isinstance(result, Live) and (whole or not result.along(-1)):
                    result = Live(self.whole(result), result.full)
                self.result = result
                self.new.output(self._as_laid_out(result))
            else:
                self.known[node] = self._known_of(node)
        self.new.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        write_over(self.new, self.parts.root)
        return fx.GraphModule(
            self.parts.root, self.new, "Subnet"
        ).eval()  # takes over what the graph names, and no more

    def _known_of(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.root).detach()
        args, kwargs = self.arguments(node)
        if not any(isinstance(leaf, (Live, Size)) for leaf in leaves((args, kwargs))):
            return call_node(node, self._called(node), args, kwargs)
        rule = self._rule_of(node)
        found = NotImplemented if rule is None else rule(self, node, *args, **kwargs)
        return self.as_it_was(node, *args, **kwargs) if found is NotImplemented else found

    def _rule_of(self, node: fx.Node) -> Shrink | None:
        if node.op == "call_module":
            module = self.module(node)
            if not module.training and (isinstance(module, _IDLE) or type(module).__name__ in DROPS_BRANCHES):
                return _passed_on
            own = next((SHRINKS[base] for base in type(module).__mro__ if base in SHRINKS), None)
            return own or SHRINKS.get(self.rule_of_units(node))
        return SHRINKS.get(node.target) or SHRINKS.get(self.rule_of_units(node))

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What is known of a node's arguments."""
        look_up = self.known.__getitem__
        return fx.node.map_arg(node.args, look_up), fx.node.map_arg(node.kwargs, look_up)

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a node of the full network calls."""
        return self.root.get_submodule(str(node.target))

    def _called(self, node: fx.Node) -> nn.Module | None:
        return self.module(node) if node.op == "call_module" else None

    # Whole operations -----------------------------------------------------------------------------------------

    def on_meta(self, node: fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What an operation of the full network returns for the two sizes of batch, as shapes and types."""
        results = []
        for example in range(len(BATCHES)):
            a, k = map_leaves((args, kwargs), partial(_example, which=example))
            results.append(dry_run_node(node, self._called(node), a, k))
        return results[0], results[1]

    def as_it_was(self, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
        """The operation of the full network on whole values."""
        if any(isinstance(leaf, Live) and leaf.axis is not None for leaf in leaves((args, kwargs))):
            self.note_whole(type(self.module(node)).__name__ if node.op == "call_module" else _name(node.target))
        results = self.on_meta(node, *args, **kwargs)
        here = self.emit(node, *map_leaves((args, kwargs), self.as_node))
        return self._wrapped(here, *results)

    def note_whole(self, kind: str) -> None:
        """Count an operation that was given its values whole again."""
        self.whole_again[kind] = self.whole_again.get(kind, 0) + 1

    def _wrapped(self, node: fx.Node, first: Any, second: Any) -> Any:
        if isinstance(first, Tensor):
            return Live(node, (first, second))
        if isinstance(first, (tuple, list)):
            parts = (self._wrapped(self.item(node, i), *pair) for i, pair in enumerate(zip(first, second, strict=True)))
            return type(first)(parts) if type(first) in (tuple, list) else tuple(parts)
        return first if first == second else Size(node, (first, second))

    # Operations on the kept entries ---------------------------------------------------------------------------

    def emit(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """The operation of a node in the smaller network, out of place.

        Args:
            node: of the full network.
            args: with values as they are laid out.
            kwargs: likewise.
        """
        a, k = map_leaves((args, kwargs), self._as_laid_out)
        if node.op == "call_module":
            return self.new.call_module(self.parts.put_module(str(node.target), self.module(node)), a, k)
        target = _OUT_OF_PLACE.get(node.target, node.target)
        if node.op == "call_method":
            name = str(target)
            target = "reshape" if name == "view" and not any(isinstance(arg, torch.dtype) for arg in a) else name
            target = target.removesuffix("_") if not target.endswith("__") else target
        k = {name: False if name == "inplace" else value for name, value in k.items()}
        return self.new.create_node(node.op, target, a, k)

    def _as_laid_out(self, leaf: Any) -> Any:
        return leaf.node if isinstance(leaf, Live) else self.as_node(leaf)

    def item(self, node: fx.Node, number: int) -> fx.Node:
        """One of several results."""
        return self.new.call_function(operator.getitem, (node, number))

    def worked_out(self, node: fx.Node, args: Any, kwargs: Any, stands_for: Callable[[Any], Any]) -> Any:
        """What an operation makes of other values.

        Args:
            node: of the full network.
            args: with :class:`Live` and :class:`Size` leaves.
            kwargs: likewise.
            stands_for: leaf → the value in its place.
        """

        def value(leaf: Any) -> Any:
            leaf = stands_for(leaf)
            return leaf.examples[0] if isinstance(leaf, Size) else leaf

        a, k = map_leaves((args, kwargs), value)
        if node.op == "call_module":
            return copy.deepcopy(self.module(node))(*a, **k)
        target = {"view": "reshape", "view_as": "reshape_as"}.get(str(node.target), node.target)
        if node.op == "call_method":
            return getattr(a[0], str(target))(*a[1:], **k)
        assert callable(target)
        return target(*a, **k)

    def rule_of_units(self, node: fx.Node) -> Rule | None:
        """The unit graph's rule for a node."""
        if node.op != "call_module":
            return RULES.get(node.target)
        kinds = type(self.module(node)).__mro__
        return next((MODULE_RULES[base] for base in kinds if base in MODULE_RULES), None)

    # Parts of the smaller network -----------------------------------------------------------------------------

    def as_node(self, leaf: Any) -> Any:
        """An argument of the smaller network, whole."""
        if isinstance(leaf, Live):
            return self.whole(leaf)
        if isinstance(leaf, Size):
            return leaf.node
        return self.parts.put_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    def whole(self, value: Live) -> fx.Node:
        """A value with the entries that are left out put back."""
        if value.axis is None:
            return value.node
        return self.bring(value, torch.arange(value.shape[value.axis]), value.axis).node

    def bring(self, value: Live, index: Tensor, axis: int) -> Live:
        """A value with other entries of an axis.

        Args:
            value: whole, or without some entries of this axis; others are put back first.
            index: what to keep, in this order.
            axis: of the full value.
        """
        axis %= value.dim
        if value.axis not in (None, axis):
            value = Live(self.whole(value), value.full)
        held = value.kept(axis)
        if torch.equal(held, index):
            return value
        key = (value.node, axis, tuple(index.tolist()))
        if key not in self._brought:
            self._brought[key] = self.fresh(value, index, axis)
        return live(self._brought[key], value.full, axis, index, value.fill)

    def fresh(self, value: Live, index: Tensor, axis: int) -> fx.Node:
        """A value with other entries of an axis as a tensor that nobody else reads, so that it may be written into.

        Padding keeps the memory format that the value comes in, and works on images of any size.
        """
        held = value.kept(axis)
        if torch.equal(held, index):
            return self.new.call_method("clone", (value.node,))
        behind = torch.equal(held, index[: len(held)])
        lacking = len(index) - len(held) if behind else int(not bool(torch.isin(index, held).all()))
        node = value.node
        if lacking:
            assert value.fill is not None, "entries without a known value were asked for"
            pad = (0, 0) * (value.dim - 1 - axis) + (0, lacking)
            node = self.new.call_function(F.pad, (node, pad), {"value": value.fill} if value.fill else {})
        return node if behind else self.new.call_function(torch.index_select, (node, axis, self.places(index, held)))

    def places(self, index: Tensor, within: Tensor) -> fx.Node:
        """Where entries lie among others, as a constant of the smaller network."""
        return self.parts.put_tensor(places_in(index, within), "index")


_IDLE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity)


_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    torch.relu_: torch.relu,
    F.relu_: F.relu,
}


def _passed_on(walk: Shrinking, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _example(leaf: Any, which: int) -> Any:
    if isinstance(leaf, Live):
        return leaf.full[which]
    if isinstance(leaf, Size):
        return leaf.examples[which]
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
