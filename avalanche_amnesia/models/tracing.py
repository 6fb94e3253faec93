"""From a backbone to its unit graph, in one walk over its torch.fx trace.

Every weighted layer (Linear, Conv) gets its source units, and its mask is multiplied in right behind it. Everything
between two weighted layers must keep a masked unit at zero, so each operation needs a rule (see ``operations``); one
without a rule is a :class:`ModelError` that names it.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from avalanche_amnesia.models.graph import ModelError, UnitGraph, WeightedLayer
from avalanche_amnesia.models.operations import (
    ADAPTIVE,
    ADDITION_METHODS,
    ADDITIONS,
    LIFTING_FUNCTIONS,
    LIFTING_METHODS,
    LIFTING_MODULES,
    POOLING_FUNCTIONS,
    POOLING_MODULES,
    SCALING_METHODS,
    SCALINGS,
    SHAPE_METHODS,
    WEIGHTED,
    ZERO_KEEPING_FUNCTIONS,
    ZERO_KEEPING_METHODS,
    ZERO_KEEPING_MODULES,
)
from avalanche_amnesia.models.units import AnyOf, Concatenated, Flattened, Inputs, LayerUnits, Units, UnitsError


@dataclass
class _Value:
    """What the walk knows of one tensor: its units and whether positions stand behind the channels (None: unknown)."""

    units: Units
    spatial: bool | None
    positions: int | None = None


def mask_channels(values: Tensor, mask: Tensor) -> Tensor:
    """``values * mask`` with the mask, ``(units,)`` or ``(batch, units)``, broadcast over the positions of a Conv."""
    return values * mask.reshape(mask.shape + (1,) * (values.dim() - 2))


def trace_backbone(backbone: nn.Module, input_shape: tuple[int, ...] | None = None) -> tuple[fx.GraphModule, UnitGraph]:
    """Trace a feature extractor and multiply a mask in behind every weighted layer.

    Args:
        backbone: any traceable module with one tensor input ``(batch, …)`` and one output ``(batch, features)``.
        input_shape: shape of one input without the batch; needed only where the width of the features can't be
            read off the layers (a convolution flattened straight into the features).

    Returns:
        The rewritten backbone, called as ``module(x, {layer name: mask})``, with the same parameter names and the
        same parameter objects; and its :class:`UnitGraph`.

    Raises:
        ModelError: for anything without a rule. Nothing is masked half.
    """
    try:
        graph = fx.Tracer().trace(backbone)
    except Exception as error:  # torch.fx raises whatever the model's own code raises on a proxy
        raise ModelError(
            f"{type(backbone).__name__} can't be traced by torch.fx ({error}). Take data-dependent control flow out "
            "of forward, or move it into a module of its own in front of the backbone"
        ) from error
    return _Rewriter(backbone, graph, input_shape).run()


class _Rewriter:
    """One walk over a traced graph: units forward, masks in."""

    def __init__(self, backbone: nn.Module, graph: fx.Graph, input_shape: tuple[int, ...] | None) -> None:
        self.backbone, self.graph = backbone, graph
        self.modules = dict(backbone.named_modules())
        self.values: dict[fx.Node, _Value] = {}
        self.layers: dict[str, WeightedLayer] = {}
        if input_shape is not None:
            self._propagate_shapes(input_shape)

    def _propagate_shapes(self, input_shape: tuple[int, ...]) -> None:
        was_training = self.backbone.training
        some = next(self.backbone.parameters(), torch.zeros(()))
        try:
            with torch.no_grad():
                ShapeProp(fx.GraphModule(self.backbone.eval(), self.graph)).propagate(some.new_zeros(1, *input_shape))
        except Exception as error:
            raise ModelError(f"the backbone does not run on an input of shape {input_shape}: {error}") from error
        finally:
            self.backbone.train(was_training)

    def run(self) -> tuple[fx.GraphModule, UnitGraph]:
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            names = [node.name for node in inputs]
            raise ModelError(f"the backbone takes {len(inputs)} inputs {names}; one tensor is allowed")
        with self.graph.inserting_after(inputs[0]):
            self.masks = self.graph.placeholder("masks")
        output: Units | None = None
        for node in list(self.graph.nodes):
            if node is self.masks:
                continue
            if node.op == "output":
                output = self._output(node)
            else:
                value = self._value_of(node)
                if value is not None:
                    self.values[node] = value
        self._check_every_parameter_is_covered()
        assert output is not None
        self.graph.lint()
        module = fx.GraphModule(self.backbone, self.graph, class_name=type(self.backbone).__name__)
        return module, UnitGraph(self.layers, output)

    # What each kind of node does to the units -----------------------------------------------------------------

    def _value_of(self, node: fx.Node) -> _Value | None:
        if node.op == "placeholder":
            shape = self._shape(node)
            channels = shape[1] if shape is not None and len(shape) > 1 else None
            return _Value(Inputs(channels), spatial=None if shape is None else len(shape) > 2)
        if node.op == "get_attr":
            raise self._error(
                node,
                "a parameter or buffer used directly in forward has no masking rule",
                "put it in a layer",
            )
        if node.op == "call_module":
            return self._module(node)
        return self._call(node)

    def _module(self, node: fx.Node) -> _Value:
        module = self.modules[str(node.target)]
        value = self._argument(node)
        if isinstance(module, WEIGHTED):
            return self._weighted(node, module, value)
        if isinstance(module, nn.Flatten):
            return self._flatten(node, value, module.start_dim, module.end_dim)
        if isinstance(module, ZERO_KEEPING_MODULES):
            return value
        if isinstance(module, POOLING_MODULES):
            return self._pooled(node, value, module.output_size if isinstance(module, ADAPTIVE) else None)
        if isinstance(module, LIFTING_MODULES):
            self._check_in_place(node, getattr(module, "inplace", False))
            return self._masked_again(node, value)
        raise self._error(
            node,
            f"{type(module).__name__} has no masking rule",
            "normalisation shared by tasks leaks between them: take it out, or put the module in front of the backbone"
            if "Norm" in type(module).__name__
            else "use a layer of torch.nn that has one, or put the module in front of the backbone",
        )

    def _weighted(self, node: fx.Node, module: Any, value: _Value) -> _Value:
        name = str(node.target)
        linear = isinstance(module, nn.Linear)
        units = module.out_features if linear else module.out_channels
        width = module.in_features if linear else module.in_channels
        if linear and value.spatial:
            raise self._error(node, "a Linear on unflattened channels mixes positions, not units", "flatten first")
        if not linear and value.spatial is False:
            raise self._error(node, "a convolution on flattened units", "keep the positions until the last convolution")
        sources = self._resolved(node, value.units, width)
        if name in self.layers:  # the same module called twice: its inputs are whatever feeds any of the calls
            sources = AnyOf((self.layers[name].sources, sources))
        self.layers[name] = WeightedLayer(
            name, units, sources, getattr(module, "groups", 1), module.weight.dim(), module.bias is not None
        )
        result = _Value(LayerUnits(name, units), spatial=not linear)
        masked = self._insert_mask(node, result.units, not linear)
        self.values[masked] = result
        return result

    def _call(self, node: fx.Node) -> _Value | None:
        target = node.target
        arguments = (*node.args, *node.kwargs.values())
        tensors = [arg for arg in arguments if isinstance(arg, fx.Node) and arg in self.values]
        if target in SHAPE_METHODS or target is getattr:
            return None  # sizes, not tensors
        if target in (operator.getitem, operator.mul, operator.floordiv) and not tensors:
            return None  # arithmetic on sizes
        if target in ZERO_KEEPING_FUNCTIONS or target in ZERO_KEEPING_METHODS:
            self._follow_training_mode(node)
            return self._argument(node)
        if target in POOLING_FUNCTIONS:
            adaptive = getattr(target, "__name__", "").startswith("adaptive")
            return self._pooled(node, self._argument(node), _argument(node, 1, "output_size") if adaptive else None)
        if target in LIFTING_FUNCTIONS or target in LIFTING_METHODS:
            self._check_in_place(node, bool(node.kwargs.get("inplace", False)))
            return self._masked_again(node, self._argument(node))
        if target is torch.flatten or target == "flatten":
            start, end = _argument(node, 1, "start_dim", 0), _argument(node, 2, "end_dim", -1)
            return self._flatten(node, self._argument(node), start, end)
        if target in ("view", "reshape") or target is torch.reshape:
            shape = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
            if len(shape) == 2 and isinstance(shape[1], int):  # (batch, everything else)
                return self._flatten(node, self._argument(node), 1, -1)
        if target == "mean" or target is torch.mean:
            return self._mean(node)
        if target in (torch.cat, torch.concat, torch.concatenate):
            return self._concatenate(node)
        if target in ADDITIONS or target in ADDITION_METHODS:
            self._check_in_place(node)
            return self._add(node, tensors)
        keeps_zero = target in (operator.mul, torch.mul) or tensors == list(node.args[:1])
        if (target in SCALINGS or target in SCALING_METHODS) and len(tensors) == 1 and keeps_zero:
            return self._known(node, tensors[0])  # by a number: zero stays zero
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        raise self._error(node, f"operation {name!r} has no masking rule", "write it with layers of torch.nn")

    def _pooled(self, node: fx.Node, value: _Value, output_size: Any) -> _Value:
        if value.spatial is False:
            name = type(self.modules[str(node.target)]).__name__ if node.op == "call_module" else node.name
            raise self._error(node, f"{name} on flattened units mixes them", "pool before flattening")
        return _Value(value.units, value.spatial, _adaptive_positions(output_size))

    def _flatten(self, node: fx.Node, value: _Value, start: Any, end: Any) -> _Value:
        if start != 1 or end != -1:
            raise self._error(node, f"flatten from {start} to {end}", "flatten everything but the batch (1 to -1)")
        if value.spatial is False:
            return value
        positions = value.positions
        shape = self._shape(node)
        if isinstance(value.units, Inputs):
            return _Value(Inputs(shape[1] if shape is not None else None), spatial=False)
        if shape is not None and value.units.size is not None:
            positions = shape[1] // value.units.size
        return _Value(Flattened(value.units, positions), spatial=False)

    def _mean(self, node: fx.Node) -> _Value:
        value = self._argument(node)
        axes = _argument(node, 1, "dim")
        axes = (axes,) if isinstance(axes, int) else tuple(axes or ())
        n_axes = self._position_axes(value.units)
        of_positions = [axis if axis >= 0 else axis + 2 + n_axes for axis in axes]
        if value.spatial is False or sorted(of_positions) != list(range(2, 2 + n_axes)):
            raise self._error(
                node, f"a mean over axes {axes} mixes units", "average over all positions, and those alone"
            )
        return _Value(value.units, spatial=bool(_argument(node, 2, "keepdim", False)), positions=1)

    def _position_axes(self, units: Units) -> int:
        if isinstance(units, LayerUnits):
            return self.layers[units.layer].weight_ndim - 2
        return max((self._position_axes(part) for part in getattr(units, "parts", ())), default=0)

    def _concatenate(self, node: fx.Node) -> _Value:
        axis = _argument(node, 1, "dim", node.kwargs.get("axis", 0))
        values = [self._known(node, part) for part in _argument(node, 0, "tensors")]
        spatial = self._common_layout(node, values)
        if axis not in ((1, -1) if spatial is False else (1,)):
            raise self._error(node, f"a concatenation along axis {axis}", "concatenate along the channels (1)")
        return _Value(Concatenated(tuple(value.units for value in values)), spatial, _common_positions(values))

    def _common_layout(self, node: fx.Node, values: list[_Value]) -> bool | None:
        layouts = {value.spatial for value in values} - {None}
        if len(layouts) > 1:
            raise self._error(node, "a value with positions beside one without", "flatten both, or neither")
        return next(iter(layouts), None)

    def _add(self, node: fx.Node, tensors: list[Any]) -> _Value:
        if len(tensors) == 1:  # plus a number
            return self._masked_again(node, self._known(node, tensors[0]))
        values = [self._known(node, tensor) for tensor in tensors]
        sizes = {value.units.size for value in values} - {None}
        spatial = self._common_layout(node, values)
        if len(sizes) > 1:
            raise self._error(node, f"addition of values with {sizes} units", "add values of equal shape")
        units = AnyOf(tuple(value.units for value in values))
        if sizes:
            size = next(size for size in sizes if size is not None)
            units = AnyOf(tuple(self._resolved(node, value.units, size) for value in values))
        return _Value(units, spatial, _common_positions(values))

    def _masked_again(self, node: fx.Node, value: _Value) -> _Value:
        if value.units.size is None:
            raise self._error(node, "an operation with f(0) ≠ 0 on units of unknown number", "give input_shape=")
        masked = self._insert_mask(node, value.units, bool(value.spatial))
        self.values[masked] = value
        return value

    def _output(self, node: fx.Node) -> Units:
        result = node.args[0]
        if not isinstance(result, fx.Node):
            raise ModelError(f"the backbone returns {type(result).__name__}; one tensor of features is allowed")
        value = self._known(node, result)
        if value.spatial and value.positions != 1:
            raise ModelError("the backbone returns a map; flatten or average it into (batch, features)")
        if isinstance(value.units, Inputs) or not self.layers:
            raise ModelError("the backbone has no Linear or Conv to mask")
        if value.units.size is None:
            raise ModelError(
                "the number of features can't be read off the layers; give input_shape=, the shape of one input "
                "without the batch, e.g. MaskedModel(backbone, input_shape=(1, 28, 28))"
            )
        return value.units

    # Small parts ----------------------------------------------------------------------------------------------

    def _follow_training_mode(self, node: fx.Node) -> None:
        # `F.dropout(x, p, self.training)` was traced with the mode of that moment; read the mode when it runs.
        if "dropout" in getattr(node.target, "__name__", ""):
            with self.graph.inserting_before(node):
                training = self.graph.get_attr("training")
            node.args, node.kwargs = (
                (node.args[0],),
                {"p": _argument(node, 1, "p", 0.5), "training": training},
            )

    def _check_in_place(self, node: fx.Node, declared: bool = False) -> None:
        """Refuse to write into a value that is read elsewhere too: there it would change behind its mask."""
        name = getattr(node.target, "__name__", str(node.target)) if node.op != "call_module" else ""
        in_place = declared or name.endswith("_") or node.target in (operator.iadd, operator.isub)
        written = node.args[0] if node.args else None
        if in_place and isinstance(written, fx.Node) and len(written.users) > 1:
            raise self._error(
                node,
                f"{name or 'the module'} writes in place into a value that is read elsewhere too",
                "use its result",
            )

    def _insert_mask(self, node: fx.Node, units: Units, spatial: bool) -> fx.Node:
        """Multiply the units' mask in right behind a node; all its users read the masked value."""
        with self.graph.inserting_before(node.next):
            mask = self._emit(units)
            masked = self.graph.call_function(mask_channels if spatial else operator.mul, (node, mask))
        node.replace_all_uses_with(masked, delete_user_cb=lambda user: user is not masked)
        return masked

    def _emit(self, units: Units) -> fx.Node:
        """The same as :meth:`Units.usage`, as nodes of the graph."""
        call = self.graph.call_function
        if isinstance(units, LayerUnits):
            return call(operator.getitem, (self.masks, units.layer))
        if isinstance(units, AnyOf):
            return functools.reduce(lambda a, b: call(torch.maximum, (a, b)), map(self._emit, units.parts))
        if isinstance(units, Concatenated):
            return call(torch.cat, ([self._emit(part) for part in units.parts], -1))
        if isinstance(units, Flattened):
            return call(torch.repeat_interleave, (self._emit(units.part), units.positions), {"dim": -1})
        assert isinstance(units, Inputs)
        return call(_open_inputs, (call(operator.getitem, (self.masks, next(iter(self.layers)))), units.size))

    def _shape(self, node: fx.Node) -> torch.Size | None:
        meta = node.meta.get("tensor_meta")
        return None if meta is None else meta.shape

    def _argument(self, node: fx.Node) -> _Value:
        return self._known(node, node.args[0] if node.args else node.kwargs.get("input"))

    def _known(self, node: fx.Node, argument: Any) -> _Value:
        if not isinstance(argument, fx.Node) or argument not in self.values:
            raise self._error(node, "an argument that is no value of this network", "pass one tensor through forward")
        return self.values[argument]

    def _resolved(self, node: fx.Node, units: Units, size: int) -> Units:
        try:
            return units.resolved(size)
        except UnitsError as error:
            raise self._error(
                node, str(error), "give input_shape=, the shape of one input without the batch"
            ) from error

    def _error(self, node: fx.Node, reason: str, mend: str) -> ModelError:
        where = f"module {str(node.target)!r}" if node.op == "call_module" else f"node {node.name!r}"
        return ModelError(f"{where} of {type(self.backbone).__name__}: {reason}; {mend}")

    def _check_every_parameter_is_covered(self) -> None:
        covered = {f"{name}.{kind}" for name in self.layers for kind in ("weight", "bias")}
        names = [name for name, _ in self.backbone.named_parameters(remove_duplicate=False)]
        if len(names) > len(list(self.backbone.parameters())):
            raise ModelError(
                f"{type(self.backbone).__name__} holds one parameter under two names {names}; a mask could protect "
                "only one of them: call one module twice instead"
            )
        loose = sorted(name for name in names if name not in covered)
        if loose:
            raise ModelError(
                f"parameters {loose} of {type(self.backbone).__name__} are in no masked layer, so that no mask would "
                "protect them; take them out of the backbone or use them through a Linear or Conv in forward"
            )


def _open_inputs(like: Tensor, size: int) -> Tensor:
    return like.new_ones(*like.shape[:-1], size)


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _common_positions(values: list[_Value]) -> int | None:
    known = {value.positions for value in values}
    return known.pop() if len(known) == 1 else None


def _adaptive_positions(output_size: Any) -> int | None:
    sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,) * 2
    return 1 if all(size == 1 for size in sizes) else None
