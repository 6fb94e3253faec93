"""Graphs in which no operation writes into its arguments, and which hold no regions of their own."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

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
            node.target = functional
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
