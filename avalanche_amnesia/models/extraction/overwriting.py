"""Activations that write over what only they read, in a network that a walk has just written."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn


def write_over(graph: fx.Graph, root: nn.Module) -> None:
    """Let a ReLU write over what a layer or a sum just made for it alone.

    Args:
        graph: rewritten in place.
        root: whose modules it names.
    """
    for node in graph.nodes:
        relu = node.target in (torch.relu, F.relu) or _made(root, node, nn.ReLU)
        source = node.args[0] if relu else None
        if isinstance(source, fx.Node) and len(source.users) == 1 and _is_fresh(root, source):
            node.op, node.target, node.args, node.kwargs = "call_function", torch.relu_, (source,), {}


def _is_fresh(root: nn.Module, node: fx.Node) -> bool:
    sums = node.target in (operator.add, torch.add, "index_add_")
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d)
    return sums or _made(root, node, layers)


def _made(root: nn.Module, node: fx.Node, kinds: Any) -> bool:
    return node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), kinds)
