"""Modules and constants of the smaller network, each under a free name and held once."""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn


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
