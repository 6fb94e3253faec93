"""The masked backbone: the user's modules, run by a graph that masks them, on inputs for which the graph holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.program import Program
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec


class Sizes:
    """Sizes of inputs for which a graph holds."""

    def __init__(self, shapes: Sequence[tuple[int | str, ...]], guards: Sequence[str]) -> None:
        self._shapes, self._guards = tuple(shapes), tuple(guards)
        self._known: set[tuple[torch.Size, ...]] = set()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse inputs for which the forward would take another path than the one that was read."""
        given = tuple(tensor.shape for tensor in tensors)
        if given not in self._known:
            if len(self._known) > 1000:
                self._known.clear()
            self._examine(given)
            self._known.add(given)

    def _examine(self, given: tuple[torch.Size, ...]) -> None:
        if any(len(shape) != len(known) for shape, known in zip(given, self._shapes, strict=True)):
            return  # left to the operations: what is flattened first takes any number of axes
        sizes: dict[str, int] = {}
        for shape, known in zip(given, self._shapes, strict=True):
            for size, expected in zip(shape, known, strict=True):
                if (expected if isinstance(expected, int) else sizes.setdefault(expected, size)) != size:
                    raise self._error(given)
        if not all(eval(guard, {"math": math}, sizes) for guard in self._guards):
            raise self._error(given)

    def _error(self, given: tuple[torch.Size, ...]) -> ModelError:
        shapes = ", ".join(f"({', '.join('any' if isinstance(s, str) else str(s) for s in k)})" for k in self._shapes)
        first = tuple(given[0])
        return ModelError(
            f"an input of shape {first}, and the backbone was read for {shapes}, and takes another path for other "
            f"sizes: make the model for it with input_shape={first[1:]}, or example="
        )


@dataclass
class Trace:
    """Masked graphs and unit graph of a backbone, without its parameters: for every backbone that is built alike."""

    programs: dict[bool, Program]
    sizes: dict[bool, Sizes]
    graph: UnitGraph
    owned: dict[str, OwnedSpec]
    constants: dict[str, Tensor]
    frozen_modules: tuple[str, ...]
    classifiers: tuple[str, ...]
    tried: bool = False


class MaskedBackbone(nn.Module):
    """A backbone with masks, under its own module and parameter names, of which it uses the objects as they are."""

    def __init__(self, backbone: nn.Module, found: Trace) -> None:
        super().__init__()
        self._modules = dict(backbone._modules)
        self._parameters = dict(backbone._parameters)
        self._buffers = dict(backbone._buffers)
        self._non_persistent_buffers_set = set(backbone._non_persistent_buffers_set)
        self.training = backbone.training
        self.original = type(backbone).__name__
        for classifier in found.classifiers:
            self._replace(classifier)
        device = next(backbone.parameters()).device
        for name, constant in found.constants.items():
            self.register_buffer(name, constant.to(device, copy=True), persistent=False)
        self.owned, self.inputs = dict(found.owned), found.graph.inputs
        self._programs, self._sizes = found.programs, found.sizes
        self._frozen, self.tried = found.frozen_modules, found.tried
        self._compile()
        self._settle_frozen()  # the modes of all others are the user's

    def _replace(self, classifier: str) -> None:
        """Leave a module out, without touching the user's own object."""
        owner: nn.Module = self
        *path, last = classifier.split(".")
        for part in path:
            twin = _shallow(owner.get_submodule(part))
            owner._modules[part] = twin
            owner = twin
        owner._modules[last] = nn.Identity()

    def _compile(self) -> None:
        self._forwards = {mode: program.compiled(self.owned) for mode, program in self._programs.items()}

    def forward(self, x: Any, own: Mapping[str, nn.Module], masks: Mapping[str, Tensor]) -> Tensor:
        """Features ``(batch, features)`` through a task's own modules and masks, by layer."""
        tensors = [x] if isinstance(x, Tensor) else self.inputs.tensors(x)
        self._sizes[self.training].check(tensors)
        result: Tensor = self._forwards[self.training](self, *tensors, own, masks)
        return result

    def train(self, mode: bool = True) -> MaskedBackbone:
        """As usual; modules declared frozen stay in evaluation mode: running statistics would move with every task."""
        super().train(mode)
        self._settle_frozen()
        return self

    def _settle_frozen(self) -> None:
        for name in self._frozen:
            self.get_submodule(name).eval()

    def program(self, training: bool = False) -> Program:
        """The graph of one mode, with what is known of its values."""
        return self._programs[training]

    def code(self, training: bool = False) -> str:
        """The forward's source, for people."""
        return self._programs[training].graph.python_code("self").src

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_forwards"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()


def _shallow(module: nn.Module) -> nn.Module:
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = dict(module._modules)
    return twin
