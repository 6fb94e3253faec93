"""Shrinking of a masked backbone to a task's open units: one walk over its graph that writes the smaller network.

The graph knows the set of units behind every entry of every value: under a task's mask some are in use. Where these
are some entries of one axis, only they are computed. What has no rule here, and values that can't be cut along one
axis, are whole, with the entries that are left out put back: always right, and layers read only the live entries.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.unit_graph.masked_backbone import as_function, follow_the_input, write_over
from avalanche_amnesia.unit_graph.masking import call_owned, owned_parameter
from avalanche_amnesia.unit_graph.values import Masked, compact, leaves, map_leaves
from avalanche_amnesia.unit_graph.walk import Rule, register, registered

A: Any = torch.ops.aten
SHRINKS: dict[Any, Rule] = {}
"""Of operations on values of which entries are left out.

A rule is called with the walk, the node, and the node's arguments; it returns NotImplemented where it needs the whole
values.
"""
shrinks = partial(register, SHRINKS)


@dataclass(frozen=True)
class Live:
    """A tensor that the smaller network computes."""

    node: fx.Node
    shape: torch.Size
    axis: int | None = None
    index: Tensor | None = None
    fill: float | None = 0.0
    content: Tensor | None = None

    def kept(self, axis: int) -> Tensor:
        """The entries that are kept along an axis, ``(kept,)``."""
        if self.index is not None and axis % len(self.shape) == self.axis:
            return self.index
        return torch.arange(self.shape[axis])

    def along(self, axis: int) -> bool:
        """Tell whether the value is whole, or lacks only entries of this axis, which are all zero."""
        return self.axis is None or (self.axis == axis % len(self.shape) and self.fill == 0)

    def at(self, node: fx.Node, shape: torch.Size, axis: int | None = None) -> Live:
        """The same entries of an axis, computed by another node."""
        return replace(self, node=node, shape=shape, axis=self.axis if axis is None else axis, content=None)


def live(
    node: fx.Node, shape: torch.Size, axis: int | None = None, index: Tensor | None = None, fill: float | None = 0.0
) -> Live:
    """A value; whole if all entries of the axis are kept, in order."""
    if axis is None or index is None or torch.equal(index, torch.arange(shape[axis])):
        return Live(node, shape)
    return Live(node, shape, axis % len(shape), index, fill)


@dataclass(frozen=True)
class Size:
    """A number that depends on the size of the input."""

    node: fx.Node
    example: Any


def one_axis(open_: Tensor, ids: Tensor) -> tuple[int, Tensor] | None:
    """The axis of which only some entries are in use, and those; None where all are, or it is no single axis."""
    small = compact(open_)
    none = not bool(small.any())
    axes = [axis for axis, size in enumerate((compact(ids) if none else small).shape) if size > 1]
    if (len(axes) != 1 and not none) or not axes:
        return None
    return axes[0], torch.zeros(1, dtype=torch.long) if none else small.reshape(-1).nonzero()[:, 0]


def nonzero(open_: Tensor) -> Tensor:
    """Numbers of the entries that are not zero; the first where there is none, since no layer may be empty."""
    found = (open_ != 0).nonzero()[:, 0]
    return found if len(found) else torch.zeros(1, dtype=torch.long)


def places_in(index: Tensor, within: Tensor) -> Tensor:
    """Places of the entries of ``index`` in ``within``; one past its end for what it lacks."""
    places = torch.full((int(torch.cat([index, within]).max()) + 1,), len(within))
    places[within] = torch.arange(len(within))
    return places[index]


def as_they_lie(wanted: Tensor, held: Sequence[Tensor], units: int) -> Tensor:
    """Entries in the order of the longest of several indices, then of the next; all ``units`` of them in order."""
    # So a value grows only at its end, by padding. In the order of their numbers they would have to be picked, which
    # costs a residual network a tenth of its time, and its memory format.
    result = wanted[:0]
    for index in (*sorted(held, key=len, reverse=True), wanted):
        result = torch.cat([result, index[torch.isin(index, wanted) & ~torch.isin(index, result)]])
    return result if len(result) < units else torch.arange(units)


class Parts:
    """Modules, parameters and constants that a graph names."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.root = graph, nn.Module()
        self._names: set[str] = set()
        self._tensors: dict[Any, fx.Node] = {}
        self._modules: dict[Any, str] = {}

    def put_tensor(self, value: Tensor, name: str = "constant") -> fx.Node:
        """A constant as a buffer, or as a parameter where it is computed from parameters."""
        learned, value = value.requires_grad, value.detach().cpu().contiguous()
        key = (learned, value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
        if key not in self._tensors:
            name = self._free(name)
            if learned:
                self.root.register_parameter(name, nn.Parameter(value.clone()))
            else:
                self.root.register_buffer(name, value.clone())
            with self.graph.inserting_after(next(iter(self.graph.nodes))):
                self._tensors[key] = self.graph.get_attr(name)
        return self._tensors[key]

    def put_module(self, name: str, key: Any, module: nn.Module) -> str:
        """A module of the smaller network; the same for the same key."""
        if key not in self._modules:
            self._modules[key] = self._free(name.replace(".", "_").replace("/", "_"))
            self.root.add_module(self._modules[key], module.eval())
        return self._modules[key]

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node of the smaller network calls."""
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _free(self, name: str) -> str:
        name = f"layer_{name}" if name[:1].isdigit() else name
        free, count = name, 0
        while free in self._names or hasattr(nn.Module, free):
            count += 1
            free = f"{name}_{count}"
        self._names.add(free)
        return free


def taken_along(module: nn.Module) -> nn.Module:
    """A copy of a module on the CPU that writes over nothing that it is given."""
    made = copy.deepcopy(module).cpu().eval()
    for part in made.modules():
        if getattr(part, "inplace", False):
            part.inplace = False  # type: ignore[assignment]
    return made


def filled(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """A module that was made without memory, with its parameters and buffers."""
    for name, value in tensors.items():
        if value is None:
            continue
        kept = value.detach().clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(kept) if name in module._parameters else kept)
    return module


def depends_on_the_input(*arguments: Any) -> bool:
    """Whether any of an operation's arguments holds numbers that are known only when the network is run."""
    return any(
        isinstance(leaf, fx.Node) or (isinstance(leaf, Live) and leaf.content is None) for leaf in leaves(arguments)
    )


class Shrinking:
    """One walk over a masked backbone's graph, which writes the network of a task's open units."""

    features: Live

    def __init__(self, model: MaskedModel, task: int) -> None:
        self.backbone, self.own = model.backbone, model.parts_of(task)
        self.program = model.backbone.program()
        self.values = self.program.values
        self.dtype = model.backbone.get_parameter(self.program.parameter).dtype if self.program.parameter else None
        mask = model.binary_mask(task).to("cpu", self.dtype or torch.get_default_dtype())
        self._use, self._masks = model.graph.sets.use(mask) > 0, model.by_layer(mask)
        self.new = fx.Graph()
        self.parts = Parts(self.new)
        self.known: dict[fx.Node, Any] = {}
        self.whole_again: dict[str, int] = {}
        self._brought: dict[Any, fx.Node] = {}
        self._names = list(model.graph.inputs.names) or ["x"]

    def run(self) -> Live:
        """Walk over the graph; return the features."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node in self.values:
                name = self._names[0] if len(self._names) == 1 else node.name
                self.known[node] = Live(self.new.placeholder(name), self.values[node].shape)
            elif node.op == "placeholder":
                self.known[node] = self.own if node.target == "own" else self._masks
            elif node.op == "output":
                self.features = self.known[node.args[0]]
            else:
                self.known[node] = self._known_of(node)
        return self.features

    def finished(self, result: fx.Node) -> fx.GraphModule:
        """The smaller network, with a node's result; it holds what its graph names, and no more."""
        self.new.output(result)
        self.new.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        real = next((name for name, p in self.parts.root.named_parameters() if p.dtype == self.dtype), "")
        follow_the_input(self.new, self.program.dtype, real)
        for node in self.new.nodes:
            as_function(node)
        write_over(self.new, self._is_fresh)
        return fx.GraphModule(self.parts.root, self.new, "Subnet").eval()

    def _is_fresh(self, node: fx.Node) -> bool:
        layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d)
        return node.target in (torch.add, "index_add_") or isinstance(self.parts.module(node), layers)

    def _known_of(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            found: Tensor = operator.attrgetter(str(node.target))(self.backbone)
            return found.cpu()
        args, kwargs = self.arguments(node)
        if node.target is owned_parameter:
            return owned_parameter(*args).cpu()
        if node.target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        moving = any(isinstance(leaf, (Live, Size, fx.Node)) for leaf in leaves((args, kwargs)))
        module = node.op == "call_module"
        # Nothing of it depends on the input or its size: computed once, and a constant of the smaller network.
        if not moving and node not in self.values and node.target is not call_owned and not module:
            return self.worked_out(node, args, kwargs)
        rule = SHRINKS["call_module"] if module else registered(SHRINKS, node.target)
        found = NotImplemented if rule is None else rule(self, node, *args, **kwargs)
        if found is not NotImplemented:
            return found
        if any(isinstance(leaf, Live) and leaf.axis is not None for leaf in leaves((args, kwargs))):
            self.note_whole(_name(node.target))
        return self.as_it_was(node, args, kwargs)

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Values of a node's arguments."""
        look_up = self.known.__getitem__
        return fx.node.map_arg(node.args, look_up), fx.node.map_arg(node.kwargs, look_up)

    def worked_out(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Result of an operation on other values, on the CPU."""
        fresh = not any(isinstance(arg, fx.Node) for arg in node.args[:1])

        def value(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if isinstance(leaf, Live):
                return leaf.content
            if fresh and leaf is self.program.dtype:
                return self.dtype or leaf
            return leaf.example if isinstance(leaf, Size) else leaf

        a, k = map_leaves((args, kwargs), value)
        if node.op == "call_method":
            return getattr(a[0], str(node.target))(*a[1:], **k)
        # Kept entries lie elsewhere in memory than all of them do, where a view may be impossible.
        target: Any = A.reshape.default if node.target in (A.view.default, A._unsafe_view.default) else node.target
        return target(*a, **k)

    # How values lie -------------------------------------------------------------------------------------------

    def open(self, node: fx.Node) -> Tensor:
        """Entries of a node's value that are in use, bool of the value's shape."""
        ids = compact(self.values[node].ids)
        return self._use[ids].expand(self.values[node].shape)

    def cut(self, node: fx.Node) -> tuple[int, Tensor] | None:
        """The axis of a node's value of which only some entries are in use, and those; None for a whole value."""
        found = one_axis(self.open(node), self.values[node].ids) if node in self.values else None
        # An axis that samples lie along as well has another length for another batch: no fixed list of entries cuts it.
        return None if found is None or found[0] in self.program.samples[node] else found

    def kept(self, node: fx.Node, axis: int, operands: Sequence[Any] = ()) -> Tensor:
        """The entries in use along an axis, in the order in which operands hold them; all where it is another one."""
        shape, cut = self.values[node].shape, self.cut(node)
        axis = axis % len(shape) - len(shape)  # from the end: operands with fewer axes are broadcast at the front
        if cut is None or cut[0] - len(shape) != axis:
            return torch.arange(shape[axis])
        held = [x.kept(axis) for x in operands if isinstance(x, Live) and x.axis == axis + len(x.shape)]
        return as_they_lie(cut[1], held, shape[axis])

    def whole(self, x: Live) -> Live:
        """A value with the entries that are left out put back."""
        return x if x.axis is None else self.bring(x, x.axis, torch.arange(x.shape[x.axis]))

    def bring(self, x: Live, axis: int, index: Tensor) -> Live:
        """A value with these entries of an axis, in this order; left-out entries of another axis are put back first."""
        axis %= len(x.shape)
        x = x if x.axis == axis else self.whole(x)
        if torch.equal(x.kept(axis), index):
            return x
        key = (x.node, axis, tuple(index.tolist()))
        # Readers that want the same entries share one node.
        if key not in self._brought:
            self._brought[key] = self.fresh(x, axis, index)
        return live(self._brought[key], x.shape, axis, index, x.fill)

    def fresh(self, x: Live, axis: int, index: Tensor, *, written: bool = False) -> fx.Node:
        """A value with other entries of an axis; padding keeps its memory format, and takes images of any size."""
        held, node = x.kept(axis), x.node
        if torch.equal(held, index):
            return self.new.call_method("clone", (node,))
        # If what is there is the beginning of what is wanted, padding at its end will do. Otherwise one entry of the
        # fill is put behind all others, and every missing one is picked from there.
        behind = torch.equal(held, index[: len(held)])
        lacking = len(index) - len(held) if behind else int(not bool(torch.isin(index, held).all()))
        if lacking:
            assert x.fill is not None, "entries without a known value were asked for"
            pad = [0, 0] * (len(x.shape) - 1 - axis) + [0, lacking]
            node = self.new.call_function(F.pad, (node, pad), {"value": x.fill} if x.fill else {})
        if behind:
            return node
        places = places_in(index, held)
        # A run of neighbours is taken as a view; what will be written into needs memory of its own.
        if not written and torch.equal(places, torch.arange(int(places[0]), int(places[0]) + len(places))):
            return self.new.call_function(torch.narrow, (node, axis, int(places[0]), len(places)))
        return self.new.call_function(torch.index_select, (node, axis, self.parts.put_tensor(places, "index")))

    def inputs(self, node: fx.Node, x: Live, axis: int) -> Live:
        """A layer's input, cut to the live entries of its axis of inputs, however the value lies."""
        if not x.along(axis):
            self.note_whole(_name(node.target))
            x = self.whole(x)
        source = node.args[1 if node.target is A.addmm.default else 0]
        assert isinstance(source, fx.Node)
        # Masked entries of a whole value are zero: the layer's columns for them would be multiplied by zero.
        if x.axis is None and source in self.values and self.values[source].masked is Masked.ZERO:
            return self.bring(x, axis, self.kept(source, axis))
        return x

    # Operations -----------------------------------------------------------------------------------------------

    def emit(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """The operation of a node in the smaller network, on values as they lie."""
        return self.new.create_node(node.op, node.target, *map_leaves((args, kwargs), self.as_node))

    def as_node(self, leaf: Any) -> Any:
        """An argument of the smaller network."""
        if isinstance(leaf, Tensor):
            return self.parts.put_tensor(leaf)
        return leaf.node if isinstance(leaf, (Live, Size)) else leaf

    def as_it_was(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The operation of the full network on whole values."""
        here = self.emit(node, *map_leaves((args, kwargs), lambda x: self.whole(x) if isinstance(x, Live) else x))
        if node in self.values:
            return Live(here, self.values[node].shape)
        if depends_on_the_input(args, kwargs):
            return here
        content = self.worked_out(node, args, kwargs)
        return Live(here, content.shape, content=content) if isinstance(content, Tensor) else Size(here, content)

    def note_whole(self, kind: str) -> None:
        """Count an operation that was given its values whole again."""
        self.whole_again[kind] = self.whole_again.get(kind, 0) + 1

    def zeros(self, node: fx.Node) -> Any:
        """Zeros like a node's value, for a batch of two; other arguments as they are."""
        if node not in self.values:
            known = self.known[node]
            return known.example if isinstance(known, Size) else known.content if isinstance(known, Live) else known
        value = self.values[node]
        dtype = self.dtype if value.dtype == self.program.dtype else value.dtype
        return torch.zeros(value.shape, dtype=dtype)

    def layer(self, name: str, key: Any, x: fx.Node, module: nn.Module) -> fx.Node:
        """The call of a module; arguments as of :meth:`Parts.put_module`."""
        return self.new.call_module(self.parts.put_module(name, key, module), (x,))


@shrinks(A.sym_size)
def size(walk: Shrinking, node: fx.Node, x: Any, dim: int) -> Any:
    """Size of an axis: known if entries of it are left out, else asked for when the network is run."""
    dim %= len(x.shape)
    return x.shape[dim] if dim == x.axis else Size(walk.emit(node, (x, dim), {}), x.shape[dim])


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target)).partition(".")[0]
