"""Modules and constants of the smaller network, each under a free name and held once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn


class Parts:
    """What a graph names.

    Args:
        graph: that names them.

    Attributes:
        root: holds them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.root = graph, nn.Module()
        self._names: set[str] = set()
        self._tensors: dict[Any, fx.Node] = {}
        self._modules: dict[Any, str] = {}

    def put_tensor(self, value: Tensor, name: str = "constant") -> fx.Node:
        """A constant as a buffer."""
        value = value.detach().cpu().contiguous()
        key = (value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
        if key not in self._tensors:
            name = self._free(name)
            self.root.register_buffer(name, value.clone())
            with self.graph.inserting_after(next(iter(self.graph.nodes))):
                self._tensors[key] = self.graph.get_attr(name)
        return self._tensors[key]

    def put_module(self, name: str, module: nn.Module, key: Any = None) -> str:
        """A module of the smaller network; the same for the same key.

        Args:
            name: what it is called in the full network.
            module: copied if no key is given.
            key: of what it was made from.
        """
        known = key if key is not None else (name, id(module))
        if known not in self._modules:
            self._modules[known] = self._free(name.replace(".", "_").replace("/", "_"))
            made = copy.deepcopy(module) if key is None else module
            for part in made.modules():
                if getattr(part, "inplace", False):
                    part.inplace = False  # type: ignore[assignment]
            self.root.add_module(self._modules[known], made.eval())
        return self._modules[known]

    def _free(self, name: str) -> str:
        name = name.removeprefix("backbone_").removeprefix("own_")
        name = f"layer_{name}" if name[:1].isdigit() else name
        free, count = name, 0
        while free in self._names or hasattr(nn.Module, free):
            count += 1
            free = f"{name}_{count}"
        self._names.add(free)
        return free
