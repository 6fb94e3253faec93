"""Values and parts of the smaller network: of one axis of a value only some entries are kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.unit_graph.units import compact


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
    # So a value grows only at its end.
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
