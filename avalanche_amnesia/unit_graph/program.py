"""A rewritten graph that can be compiled, copied and pickled."""

from __future__ import annotations

import importlib
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.masking import call_owned, leave_closed_out, masked
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec
from avalanche_amnesia.unit_graph.values import Value

ATEN: Any = torch.ops.aten


class Program:
    """One mode of a masked backbone."""

    def __init__(self, graph: fx.Graph, values: Mapping[fx.Node, Any], dtype: torch.dtype, parameter: str) -> None:
        self.graph, self.dtype, self.parameter = graph, dtype, parameter
        self.values = {node: value for node, value in values.items() if isinstance(value, Value)}
        self.samples = _axes_of_samples(graph, self.values)

    def __deepcopy__(self, memo: object) -> Program:
        return self  # nothing in it ever changes

    def __getstate__(self) -> dict[str, Any]:
        number = {node: i for i, node in enumerate(self.graph.nodes)}

        def numbered(used: fx.Node) -> Any:
            return _Ref(number[used])

        steps = [
            (
                *(node.name, node.op, _named(node.target)),
                *fx.node.map_arg((node.args, node.kwargs), numbered),
                (self.values.get(node), self.samples.get(node)),
            )
            for node in self.graph.nodes
        ]
        return {"steps": steps, "dtype": self.dtype, "parameter": self.parameter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.graph, self.values, self.samples = fx.Graph(), {}, {}
        self.dtype, self.parameter = state["dtype"], state["parameter"]
        nodes: list[fx.Node] = []
        for name, op, target, args, kwargs, value in state["steps"]:
            node = self.graph.create_node(op, _found(target), _filled(args, nodes), _filled(kwargs, nodes), name)
            nodes.append(node)
            for known, found in ((self.values, value[0]), (self.samples, value[1])):
                if found is not None:
                    known[node] = found

    def compiled(self, owned: Mapping[str, OwnedSpec]) -> Callable[..., Tensor]:
        """The graph as a function of the module, inputs, own modules and masks."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, copies))
        follow_the_input(graph, self.dtype, self.parameter)
        for node in graph.nodes:
            as_function(node)
        write_over(graph, lambda source: _is_fresh(source, owned))
        leave_closed_out(graph)
        code = graph.python_code("self")
        scope = dict(code.globals)
        exec(compile(code.src, "<masked backbone>", "exec"), scope)
        forward: Callable[..., Tensor] = scope["forward"]
        return forward


def _axes_of_samples(graph: fx.Graph, values: Iterable[fx.Node]) -> dict[fx.Node, frozenset[int]]:
    inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    sizes = [value.shape[0] for value in inputs if isinstance(value, Tensor) and value.dim()]
    free: list[Any] = [size for size in sizes if isinstance(size, torch.SymInt)]
    batch = {symbol for size in free for symbol in size.node.expr.free_symbols}
    found = {}
    for node in values:
        value = node.meta.get("val")
        shape = list(enumerate(value.shape)) if isinstance(value, Tensor) else []
        moving: list[tuple[int, Any]] = [(axis, size) for axis, size in shape if isinstance(size, torch.SymInt)]
        found[node] = frozenset(axis for axis, size in moving if batch & size.node.expr.free_symbols)
    return found


@dataclass(frozen=True)
class _Ref:
    """A node, by its number in the graph."""

    number: int


def _filled(tree: Any, nodes: list[fx.Node]) -> Any:
    return fx.node.map_aggregate(tree, lambda leaf: nodes[leaf.number] if isinstance(leaf, _Ref) else leaf)


def _named(target: Any) -> Any:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return ("operation", target.namespace, target._schema.name.partition("::")[2], target._overloadname)
    return ("function", target.__module__, target.__qualname__.removeprefix("_VariableFunctionsClass."))


def _found(target: Any) -> Any:
    if isinstance(target, str):
        return target
    kind, *names = target
    root: Any = torch.ops if kind == "operation" else importlib.import_module(names.pop(0))
    for name in names:
        root = getattr(root, name)
    return root


# From operations to functions ------------------------------------------------------------------------------------


def follow_the_input(graph: fx.Graph, dtype: torch.dtype, parameter: str) -> None:
    """Let what the forward makes lie on the device that its input lies on, and be of the parameters' type."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    made = [node for node in graph.nodes if any(isinstance(leaf, torch.device) for leaf in _leaves(node))]
    if not made:
        return
    with graph.inserting_after(places[-1]):
        device = graph.call_function(getattr, (places[0], "device"))
    with graph.inserting_after(device):
        like = graph.get_attr(parameter)
    with graph.inserting_after(like):
        real = graph.call_function(getattr, (like, "dtype"))

    for node in made:
        fresh = not node.all_input_nodes or not any(isinstance(arg, fx.Node) for arg in node.args[:1])

        def followed(leaf: Any, fresh: bool = fresh) -> Any:
            if isinstance(leaf, torch.device):
                return device
            return real if fresh and leaf is dtype else leaf

        node.args = fx.node.map_aggregate(node.args, followed)
        node.kwargs = fx.node.map_aggregate(node.kwargs, followed)


def _leaves(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found


def as_function(node: fx.Node) -> None:
    """Call torch's function instead of the operator: it is the same, and quicker from Python."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return
    name = target._schema.name.removeprefix("aten::")
    if name == "slice" and not node.kwargs:
        _as_index(node)
        return
    name = {"view": "reshape", "_unsafe_view": "reshape"}.get(name, name) if target._overloadname != "dtype" else name
    for library in (torch, torch._C._nn):
        found = getattr(library, name, None)
        if isinstance(found, types.BuiltinFunctionType):
            node.target = found
            return
    method = {"sym_size": "size"}.get(name, name)
    plain = not node.kwargs and target._overloadname in ("default", "int", "dtype", "other", "")
    if plain and isinstance(getattr(torch._C.TensorBase, method, None), types.MethodDescriptorType):
        node.op, node.target = "call_method", method


def _as_index(node: fx.Node) -> None:
    given: Any = node.args
    defaults: Any = (0, None, None, 1)
    filled: Any = tuple(given) + defaults[len(given) - 1 :]
    x, dim, start, end, step = filled
    if isinstance(dim, int) and dim >= 0:
        whole = isinstance(end, int) and end >= 2**62
        part = slice(start, None if whole else end, step if step != 1 else None)
        node.target, node.args = operator.getitem, (x, (slice(None),) * dim + (part,))


def write_over(graph: fx.Graph, is_fresh: Callable[[fx.Node], bool]) -> None:
    """Let a ReLU write over what was made only for it."""
    for node in graph.nodes:
        source = node.args[0] if node.target is torch.relu else None
        if isinstance(source, fx.Node) and len(source.users) == 1 and is_fresh(source):
            node.target = torch.relu_


def _is_fresh(node: fx.Node, owned: Mapping[str, OwnedSpec]) -> bool:
    norm = node.target is call_owned and owned[str(node.args[1])].kind is not None
    return norm or node.target in (masked, torch.add, torch.conv1d, torch.conv2d, torch.conv3d)
