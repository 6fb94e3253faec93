"""What a module makes of its arguments, as shapes and types alone, without touching the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree


def dry_run(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Run a module without memory; where that can't be done, on zeros.

    A forward that makes constants, keeps tensors that are no buffers, or looks at values runs on zeros alone.

    Args:
        module: any; its parameters, buffers and the state of the random number generator stay as they are.
        args: for its forward; tensors on the meta device.
        kwargs: likewise.

    Raises:
        Exception: whatever the module raises.
    """
    with torch.no_grad():
        try:
            return _call(module, lambda value: torch.empty_like(value, device="meta"), args, kwargs)
        except Exception as error:  # whatever the module raises
            if "meta" not in str(error):
                raise
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        given = pytree.tree_map_only(Tensor, lambda x: torch.zeros_like(x, device=device), (tuple(args), kwargs))
        with torch.random.fork_rng(devices=[]):
            found = _call(module, torch.clone, *given)
        return pytree.tree_map_only(Tensor, lambda value: value.to("meta"), found)


def call_node(node: fx.Node, module: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation of a graph makes of other arguments.

    Args:
        node: the operation.
        module: that it calls; None for a function or a method.
        args: in the place of its own.
        kwargs: likewise.
    """
    if module is not None:
        return module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def dry_run_node(node: fx.Node, module: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As :func:`call_node`, as shapes and types alone: on the meta device, whatever device the operation names.

    Raises:
        Exception: whatever the operation raises.
    """
    kwargs = {name: torch.device("meta") if name == "device" else value for name, value in kwargs.items()}
    return call_node(node, None, args, kwargs) if module is None else dry_run(module, args, kwargs)


def _call(module: nn.Module, replaced: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    # Each module under one name: functional_call would take its second name's stand-in for the original, and leave it.
    state = {
        f"{prefix}.{name}".lstrip("."): replaced(value)
        for prefix, inner in module.named_modules()
        for name, value in (*inner._parameters.items(), *inner._buffers.items())
        if value is not None
    }
    return functional_call(module, state, tuple(args), dict(kwargs or {}), tie_weights=False)
