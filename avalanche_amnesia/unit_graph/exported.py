"""Graphs that torch.export returned, with attributes by their own names, and nothing that writes into its arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._sympy.printers import PythonPrinter

ATEN: Any = torch.ops.aten

# Composite operations that always return memory of their own; of all others their schema tells.
_FRESH_COMPOSITES = frozenset(
    f"aten::{name}"
    for name in (
        *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "matmul"),
    )
)
_OTHER_NAMES = {"bernoulli_.float": ATEN.bernoulli.p, "bernoulli_.Tensor": None}


@dataclass
class Exported:
    """One mode's graph: placeholders are the inputs, parameters, buffers and constants are attributes."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    written: list[str]
    calls: list[tuple[str, Any]]
    sizes: dict[Any, int] = field(default_factory=dict)
    batch: set[Any] = field(default_factory=set)
    shapes: list[tuple[int | str, ...]] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)

    def copied(self) -> Exported:
        """The same with a graph of its own, for a walk to rewrite."""
        return replace(self, graph=_renamed(self.graph))

    def size(self, value: Any, batch: int) -> int:
        """A size, or another number, for some number of samples."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        known = self.sizes | dict.fromkeys(self.batch, batch)
        found = value.node.expr.subs(known)
        if found.free_symbols:
            raise ValueError("it depends on values")
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        return kind(found)


def as_attributes(backbone: nn.Module, program: Any, calls: list[tuple[str, Any]]) -> Exported:
    """The graph of an exported program, with the backbone's parameters and buffers under their own names."""
    graph, signature = program.graph, program.graph_signature
    graph.owning_module = None  # its attributes are the backbone's, not those of what torch.export made
    # Tied tensors go by one name: under two, each would count only the units that read it there as its users.
    first_name = {id(value): name for name, value in (*backbone.named_parameters(), *backbone.named_buffers())}
    exported = Exported(graph, {}, [], calls)
    _take_sizes(exported, program)
    written = _drop_statistics(graph, signature)
    exported.written = sorted(name.removeprefix("backbone.") for name in written)
    attributes = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            # Inputs stay even if unread: they are the signature.
            if node.name in attributes or node.name in constants:
                graph.erase_node(node)
        elif node.op == "placeholder" and node.name in attributes:
            name = attributes[node.name].removeprefix("backbone.")
            _replace_by_attribute(graph, node, first_name.get(id(operator.attrgetter(name)(backbone)), name))
        elif node.op == "placeholder" and node.name in constants:
            value = program.constants[constants[node.name]]
            name = f"_constant_{len(exported.constants)}"
            exported.constants[name] = value.detach().clone()
            _replace_by_attribute(graph, node, name)
    _drop_idle(graph)
    graph.lint()
    exported.graph = _renamed(graph)
    return exported


def _renamed(graph: fx.Graph) -> fx.Graph:
    """The same graph with names that are the same in both modes, whatever was taken out of it."""
    found, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = node.name if node.op == "placeholder" else None
        copies[node] = found.create_node(node.op, node.target, args, kwargs, name)
        copies[node].meta = dict(node.meta)
    return found


def _replace_by_attribute(graph: fx.Graph, node: fx.Node, name: str) -> None:
    first = next(iter(n for n in graph.nodes if n.op != "placeholder"))
    with graph.inserting_before(first):
        attribute = graph.get_attr(name)
    attribute.meta = dict(node.meta)
    node.replace_all_uses_with(attribute)
    graph.erase_node(node)


def _take_sizes(exported: Exported, program: Any) -> None:
    names = program.graph_signature.user_inputs
    places = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    environment: Any = None
    for node in places:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        sizes: tuple[Any, ...] = tuple(value.shape)
        exported.shapes.append(tuple(str(size.node.expr) if _is_free(size) else int(size) for size in sizes))
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                symbols = size.node.expr.free_symbols
                environment = size.node.shape_env
                known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val  # by torch's version
                for symbol in symbols:
                    exported.sizes.setdefault(symbol, int(known[symbol]))
                if dim == 0:
                    exported.batch |= symbols
    if environment is not None:
        free = {size for shape in exported.shapes for size in shape if isinstance(size, str)}
        conditions = {environment.replace(guard.expr) for guard in environment.guards}
        exported.guards = sorted(PythonPrinter().doprint(c) for c in conditions if _compares_sizes(c, free))


def _is_free(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_symbol)


def _compares_sizes(condition: Any, free: Collection[str]) -> bool:
    """Tell whether a condition compares sizes of inputs with each other or with a number."""
    # Those on sizes of inner values are nearly all torch's own, about how memory lies, and decide nothing.
    names = set(map(str, condition.free_symbols))
    return bool(names) and names <= set(free) and all(part.is_symbol or part.is_Integer for part in condition.args)


def _drop_statistics(graph: fx.Graph, signature: Any) -> set[str]:
    """Replace exported norms by plain calls, without the statistics that they leave in their buffers."""
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    buffer_of = {signature.inputs_to_buffers.get(n.name): n for n in graph.nodes if n.op == "placeholder"}
    written, features = set(), []
    for result, kind in zip(results, signature.output_specs, strict=True):
        if kind.kind.name == "USER_OUTPUT":
            features.append(result)
        # torch.export returns changed buffers as further results. A norm's statistics are left to the tasks' own
        # copies; any other change would be shared by all tasks, and is reported.
        elif kind.kind.name == "BUFFER_MUTATION" and not _is_statistic(result, buffer_of[kind.target], kind.target):
            written.add(kind.target)
    output.args = tuple(features)
    for node in list(graph.nodes):
        if node.target in _NORMS_OF_EXPORT:
            args = _NORMS_OF_EXPORT[node.target](*node.args)
            args = (*args[:3], *map(_before_norms, args[3:5]), *args[5:])
            _replace_tuple(graph, node, ATEN.batch_norm.default, args)
        elif node.target is ATEN.native_dropout.default:
            _replace_tuple(graph, node, ATEN.dropout.default, node.args)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return written


def _is_statistic(result: fx.Node, buffer: fx.Node, name: str) -> bool:
    if name.endswith("num_batches_tracked"):
        # One is added per call: a norm that is called twice counts twice.
        while result.target is ATEN.add.Tensor and result.args[1] == 1:
            result = result.args[0]  # type: ignore[assignment]
        return result is buffer
    return _before_norms(result) is buffer


def _before_norms(statistic: Any) -> Any:
    """The buffer that a norm's statistic was before the norm changed it, and other calls of it before."""
    while isinstance(statistic, fx.Node) and statistic.target is operator.getitem:
        norm, number = statistic.args
        if norm.target not in _NORMS_OF_EXPORT or number not in (3, 4):  # type: ignore[union-attr]
            break
        statistic = norm.args[number]  # type: ignore[union-attr, index]
    return statistic


_NORMS_OF_EXPORT: dict[Any, Callable[..., tuple[Any, ...]]] = {
    ATEN._native_batch_norm_legit_functional.default: lambda x, w, b, mean, var, training, momentum, eps: (
        *(x, w, b, mean, var, training, momentum, eps),
        False,
    ),
    ATEN._native_batch_norm_legit_no_training.default: lambda x, w, b, mean, var, momentum, eps: (
        *(x, w, b, mean, var, False, momentum, eps),
        False,
    ),
    ATEN._native_batch_norm_legit.no_stats: lambda x, w, b, training, momentum, eps: (
        *(x, w, b, None, None, training, momentum, eps),
        False,
    ),
}


def _replace_tuple(graph: fx.Graph, node: fx.Node, target: Any, args: Any) -> None:
    """Replace an operation that returns several tensors, of which only the first is read."""
    first = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    with graph.inserting_before(node):
        made = graph.call_function(target, tuple(args))
    made.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in first:
        user.replace_all_uses_with(made)


def _drop_idle(graph: fx.Graph) -> None:
    # From the end, so that what only an erased node read goes in the same pass.
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        checks = name.startswith(("aten._assert", "aten.sym_constrain")) or node.target is torch._check
        idle = node.target is ATEN.dropout.default and (not node.args[2] or node.args[1] == 0)
        if idle or node.target is ATEN.alias.default:
            node.replace_all_uses_with(node.args[0])
        if (node.op == "call_function" and (checks or not node.users)) or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)


# Nothing is written ------------------------------------------------------------------------------------------------


def inline_regions(module: fx.GraphModule) -> None:
    """Put the nodes of regions (``torch.no_grad``, autocast) into the graph around them."""
    graph = module.graph
    while True:
        regions = [node for node in graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]
        if not regions:
            break
        for node in regions:
            name = str(node.target.name()) if callable(node.target.name) else str(node.target)
            if "set_grad_enabled" in name:
                enabled, inner, operands = bool(node.args[0]), node.args[1], node.args[2:]
            elif "autocast" in name and not node.args[2]:
                enabled, inner, operands = True, node.args[4], node.args[5:]
            elif "autocast" in name:
                raise NotImplementedError("a region in lower precision (torch.autocast) inside of forward")
            else:
                raise NotImplementedError(f"control flow inside of forward ({name})")
            _inline(module, node, getattr(module, inner.target), operands, detached=not enabled)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _writes(node))


def _inline(module: fx.GraphModule, node: fx.Node, region: fx.GraphModule, operands: Any, *, detached: bool) -> None:
    graph = module.graph
    copies: dict[fx.Node, Any] = {}
    places = [inner for inner in region.graph.nodes if inner.op == "placeholder"]
    copies.update(zip(places, operands, strict=True))
    with graph.inserting_before(node):
        for inner in region.graph.nodes:
            if inner.op == "get_attr":
                name = f"{node.name}_{inner.target}".replace(".", "_")
                setattr(module, name, getattr(region, inner.target))
                copies[inner] = graph.get_attr(name)
            elif inner.op not in ("placeholder", "output"):
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
            elif inner.op == "output":
                results = fx.node.map_arg(inner.args[0], copies.__getitem__)
        if detached:
            results = [_detached(graph, result) for result in results]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _detached(graph: fx.Graph, result: Any) -> Any:
    if not isinstance(result, fx.Node) or not isinstance(result.meta.get("val"), torch.Tensor):
        return result
    node = graph.call_function(ATEN.detach.default, (result,))
    node.meta = dict(result.meta)
    return node


def write_nothing(graph: fx.Graph, counters: frozenset[fx.Node]) -> bool:
    """Replace operations that write over a value which only they read by ones that return a new value."""
    left = False
    for node in list(graph.nodes):
        if not _writes(node):
            continue
        written = node.args[0]
        counted = node.target is ATEN.add_.Tensor and written in counters and node.args[1] == 1
        if counted and all(not user.users for user in written.users):
            graph.erase_node(node)
            continue
        functional = _functional(node.target)
        if functional is None or not isinstance(written, fx.Node) or list(written.users) != [node]:
            left = True
        elif node.target is ATEN.detach_.default or _is_fresh(written):
            # An operation may have defaults where the one that returns a new value has none (bernoulli_).
            places = [place for place in node.target._schema.arguments if not place.kwarg_only]
            missing = (p.default_value for p in places[len(node.args) :] if p.name not in node.kwargs)
            node.target, node.args = functional, (*node.args, *missing)
        else:
            left = True
    return not left


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _functional(target: Any) -> Any:
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    if f"{name}.{overload}" in _OTHER_NAMES:
        return _OTHER_NAMES[f"{name}.{overload}"]
    packet = getattr(ATEN, name.removesuffix("_"), None) if name.endswith("_") else None
    found = getattr(packet, overload, None)
    return found if found is not None and not found._schema.is_mutable else None


def _is_fresh(node: fx.Node) -> bool:
    """Tell whether a value lies in memory that nothing else refers to."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if node.op != "call_function" or schema is None or any(result.alias_info for result in schema.returns):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return not composite or schema.name in _FRESH_COMPOSITES
