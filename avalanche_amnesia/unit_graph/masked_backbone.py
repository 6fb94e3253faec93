"""The masked backbone: the user's modules, run by a rewritten graph with masks, after a check of the inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.masking import AS_FUNCTIONS, skip_closed_units
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec, OwnModules
from avalanche_amnesia.unit_graph.values import leaves


class Program:
    """Rewritten graph of a masked backbone in one mode, which can be compiled, copied and pickled."""

    def __init__(self, graph: fx.Graph, dtype: torch.dtype, parameter: str) -> None:
        self.graph, self.dtype, self.parameter = graph, dtype, parameter

    def __deepcopy__(self, memo: object) -> Program:
        return self  # immutable

    def __getstate__(self) -> dict[str, Any]:
        number: dict[fx.Node, Any] = {node: operator.itemgetter(i) for i, node in enumerate(self.graph.nodes)}
        steps = [
            (
                *(node.name, node.op),
                # Operations can't be pickled, but their names in ``torch.ops`` can.
                operator.attrgetter(str(node.target)) if isinstance(node.target, OpOverload) else node.target,
                *fx.node.map_arg((node.args, node.kwargs), number.__getitem__),
            )
            for node in self.graph.nodes
        ]
        return {"steps": steps, "dtype": self.dtype, "parameter": self.parameter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.graph = fx.Graph()
        self.dtype, self.parameter = state["dtype"], state["parameter"]
        nodes: list[fx.Node] = []

        def find(leaf: Any) -> Any:
            return leaf(nodes) if isinstance(leaf, operator.itemgetter) else leaf

        for name, op, target, args, kwargs in state["steps"]:
            target = target(torch.ops) if isinstance(target, operator.attrgetter) else target
            filled: Any = fx.node.map_aggregate((args, kwargs), find)
            nodes.append(self.graph.create_node(op, target, filled[0], filled[1], name))

    def as_function(self, module: nn.Module) -> Callable[..., Tensor]:
        """Return the graph as a function that maps a module, inputs, the task's own modules and masks to features."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, copies))
        follow_the_input(graph, self.dtype, self.parameter)
        for node in graph.nodes:
            node.target = AS_FUNCTIONS.get(node.target, node.target)
        skip_closed_units(graph)
        return type(fx.GraphModule(module, graph)).forward


class Sizes:
    """Input shapes for which a traced graph is valid: fixed and free sizes, and conditions on the free sizes."""

    def __init__(self, shapes: Sequence[tuple[int | str, ...]], guards: Sequence[str]) -> None:
        self._shapes, self._guards = tuple(shapes), tuple(guards)
        self._known: set[tuple[torch.Size, ...]] = set()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ModelError if, for inputs of these shapes, the original forward may differ from the traced graph."""
        given = tuple(tensor.shape for tensor in tensors)
        if given in self._known:
            return
        if not self._guards_hold(given):
            shapes = ", ".join(
                f"({', '.join('any' if isinstance(s, str) else str(s) for s in k)})" for k in self._shapes
            )
            first = tuple(given[0])
            raise ModelError(
                f"an input of shape {first}, and the backbone was read for {shapes}, and takes another path for other "
                f"sizes: make the model for it with input_shape={first[1:]}, or example="
            )
        if len(self._known) > 1000:
            self._known.clear()
        self._known.add(given)

    def _guards_hold(self, given: tuple[torch.Size, ...]) -> bool:
        pairs = list(zip(given, self._shapes, strict=True))
        if any(len(shape) != len(known) for shape, known in pairs):
            return True  # the operations check it: a flattened input may have any number of axes
        sizes: dict[str, int] = {}
        for size, expected in (pair for shape, known in pairs for pair in zip(shape, known, strict=True)):
            if (expected if isinstance(expected, int) else sizes.setdefault(expected, size)) != size:
                return False
        return all(eval(guard, {"math": math}, sizes) for guard in self._guards)


@dataclass
class Trace:
    """Result of tracing a backbone: its forward code with masks, and the units that each weight connects."""

    programs: dict[bool, Program]
    sizes: dict[bool, Sizes]
    graph: UnitGraph
    owned: dict[str, OwnedSpec]
    constants: dict[str, Tensor]
    frozen_modules: tuple[str, ...]
    classifiers: tuple[str, ...]
    tried: bool = False


class MaskedBackbone(nn.Module):
    """A backbone with masks; its modules and parameters are the user's own objects under the same names."""

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
        self._eval_frozen()  # only frozen modules: the user sets the modes of all other modules

    def _replace(self, classifier: str) -> None:
        """Replace the module ``classifier`` by an Identity in this backbone, without changing the user's object."""
        owner: nn.Module = self
        *path, last = classifier.split(".")
        for part in path:
            module = owner.get_submodule(part)
            twin = owner._modules[part] = module.__class__.__new__(module.__class__)
            twin.__dict__ = {**vars(module), "_modules": dict(module._modules)}
            owner = twin
        owner._modules[last] = nn.Identity()

    def _compile(self) -> None:
        self._forwards = {mode: program.as_function(self) for mode, program in self._programs.items()}

    def forward(self, x: Any, own: Mapping[str, nn.Module], masks: Mapping[str, Tensor]) -> Tensor:
        """Return features ``(batch, features)``, computed with a task's modules ``own`` and its masks by layer name."""
        tensors = [x] if isinstance(x, Tensor) else self.inputs.tensors(x)
        self._sizes[self.training].check(tensors)
        return self._forwards[self.training](self, *tensors, own, masks)

    def train(self, mode: bool = True) -> MaskedBackbone:
        """Set training mode, except for frozen modules, because each task would change their running statistics."""
        super().train(mode)
        self._eval_frozen()
        return self

    def _eval_frozen(self) -> None:
        for name in self._frozen:
            self.get_submodule(name).eval()

    def fresh_parts(self) -> OwnModules:
        """Return new copies of all task-owned modules and parameters except the head, with the backbone's values."""
        return OwnModules({name: spec.make(self) for name, spec in self.owned.items()})

    def program(self, training: bool = False) -> Program:
        """Return the traced and masked graph of the backbone for training (``training=True``) or evaluation mode."""
        return self._programs[training]

    def code(self, training: bool = False) -> str:
        """Return the Python source code of the masked forward in training (True) or evaluation mode."""
        return self._programs[training].graph.python_code("self").src

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_forwards"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()


# Replacing operations by functions -------------------------------------------------------------------------------


def follow_the_input(graph: fx.Graph, dtype: torch.dtype, parameter: str) -> None:
    """Rewrite operations that create tensors, so that they use the input's device and the parameters' type."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    made = [
        node for node in graph.nodes if any(isinstance(leaf, torch.device) for leaf in leaves((node.args, node.kwargs)))
    ]
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

        def follow(leaf: Any, fresh: bool = fresh) -> Any:
            if isinstance(leaf, torch.device):
                return device
            return real if fresh and leaf is dtype else leaf

        node.args = fx.node.map_aggregate(node.args, follow)
        node.kwargs = fx.node.map_aggregate(node.kwargs, follow)
