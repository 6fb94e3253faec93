"""Export of a backbone in training or evaluation mode to a functional graph of ATen operations: :func:`export`.

Attributes of the graph keep their names in the backbone. No operation writes into its arguments.
"""

from __future__ import annotations

import io
import operator
import os
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.unit_graph.backbones import Inputs, first_float, preserve_state
from avalanche_amnesia.unit_graph.declared_calls import DeclaredCalls
from avalanche_amnesia.unit_graph.findings import ModelError

ATEN: Any = torch.ops.aten
PLAIN_AVERAGE = -1.0
"""Momentum used in place of None while a norm is exported, because None would divide by an unknown count."""
# torch.export treats the sizes 0 and 1 as constants, so such a batch would fix the number of samples.
EXPORTED_BATCH = 3
_one_at_a_time = threading.RLock()  # torch.export patches nn.Module for all threads while it traces


@dataclass
class Exported:
    """Graph of a backbone in training or evaluation mode: inputs are placeholders, all other tensors are attributes."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    written: list[str]
    calls: list[tuple[str, Any]]
    sizes: dict[Any, int] = field(default_factory=dict)
    batch: set[Any] = field(default_factory=set)
    shapes: list[tuple[int | str, ...]] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)

    def copied(self) -> Exported:
        """Return a copy with an editable graph; its node names are the same for training and evaluation mode."""
        found, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            name = node.name if node.op == "placeholder" else None
            copies[node] = found.create_node(node.op, node.target, args, kwargs, name)
            copies[node].meta = dict(node.meta)
        return replace(self, graph=found)

    def size(self, value: Any, batch: int) -> int:
        """Return the number that a symbolic size has for ``batch`` samples. A plain number is returned unchanged."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        known = self.sizes | dict.fromkeys(self.batch, batch)
        found = value.node.expr.subs(known)
        if found.free_symbols:
            raise ValueError("it depends on values")
        return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)](found)


class _Root(nn.Module):
    """Module for torch.export that calls the backbone with one signature: a list of input tensors in, features out."""

    def __init__(self, backbone: nn.Module, inputs: Inputs, calls: DeclaredCalls) -> None:
        super().__init__()
        self.backbone, self._inputs, self._calls = backbone, inputs, calls

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        self._calls.begin(tensors)
        watched = _RefuseOutsideTensors(self.backbone) if torch.compiler.is_exporting() else nullcontext()
        with watched:
            return features_of(self.backbone, self._inputs, tensors)


class _RefuseOutsideTensors(TorchFunctionMode):
    """Torch mode that raises ModelError if forward uses a trainable tensor that is no parameter of the backbone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._name = type(backbone).__name__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if type(leaf) in (Tensor, nn.Parameter) and leaf.requires_grad and leaf.is_leaf and not is_fake(leaf):
                raise ModelError(
                    f"forward of {self._name} uses a tensor of shape {tuple(leaf.shape)} that learns and is no "
                    "parameter of the backbone: make it an nn.Parameter, and keep modules in an nn.ModuleList"
                )
        return func(*args, **(kwargs or {}))


def features_of(backbone: nn.Module, inputs: Inputs, tensors: Sequence[Tensor]) -> Tensor:
    """Run a backbone and return its features: the result, or the only two-axis tensor in a tuple or mapping."""
    args, kwargs = inputs.arguments(backbone, tensors)
    result = backbone(*args, **kwargs)
    if isinstance(result, Tensor):
        return result
    leaves = {id(t): t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)}  # heads may share one
    found = [t for t in leaves.values() if t.is_floating_point() and t.dim() == 2]
    if len(found) == 1:
        return found[0]
    raise ModelError(
        f"{type(backbone).__name__} returns a {type(result).__name__} with {len(found)} tensors of shape "
        "(batch, features), and it is not clear which are the features; wrap it in a module that returns one tensor"
    )


def export(
    backbone: nn.Module, inputs: Inputs, *, training: bool, frozen: Collection[str], task_owned: Collection[str]
) -> Exported:
    """Trace a backbone with torch.export in training (``training=True``) or evaluation mode, and return its graph."""
    calls = DeclaredCalls()
    root = _Root(backbone, inputs, calls)
    modules = dict(backbone.named_modules())
    whole = {name: modules[name] for name in (*frozen, *task_owned) if name in modules}  # the rest are parameters
    with _one_at_a_time, preserve_state(backbone):
        root.train(training)
        # Frozen modules run in evaluation mode in both graphs: every task would change their running statistics.
        for name in set(frozen) & whole.keys():
            whole[name].eval()
        calls.replace_forwards(root, whole, inputs)
        try:
            program = _functional_program(root, inputs)
        except ModelError:
            raise
        except Exception as error:  # the backbone's own code may raise any exception
            raise _located_error(backbone, error) from error
    return as_attributes(backbone, program, calls.seen)


def _functional_program(root: _Root, inputs: Inputs) -> Any:
    """Return the exported program of ``root``, without operations that write into their arguments."""
    for module in root.modules():
        if isinstance(module, _NormBase) and module.momentum is None:
            module.momentum = PLAIN_AVERAGE
    tensors = inputs.tensors(inputs.batch(EXPORTED_BATCH, like=first_float(root)))
    tokens = not inputs.dtype.is_floating_point  # their number is the length of the longest sample in a batch
    program = _program(root, tensors, any_size=inputs.guessed or tokens)
    inline_regions(program.graph_module)
    signature = program.graph_signature
    if any(spec.kind.name == "CUSTOM_OBJ" for spec in signature.input_specs):
        raise ModelError(
            f"forward of {type(root.backbone).__name__} draws from a torch.Generator of its own, which no task's seed "
            "sets: leave generator= out, and draw only in training (if self.training: …), or use nn.Dropout"
        )
    batch_counters = frozenset(
        node
        for node in program.graph.nodes
        if signature.inputs_to_buffers.get(node.name, "").endswith("num_batches_tracked")
    )
    # torch's functionalisation takes any graph but processes all of it again: use it only if needed.
    simple = remove_in_place(program.graph, batch_counters) and all(map(_is_plain, program.graph.nodes))
    return program if simple else program.run_decompositions({})


def _program(root: nn.Module, tensors: list[Tensor], *, any_size: bool) -> Any:
    """Export ``root`` for any batch size and, if ``any_size``, any input size as well (slower); return the program."""
    free = [dict.fromkeys(range(t.dim()) if any_size else [0], torch.export.Dim.AUTO) for t in tensors]
    try:
        with _copied_sizes(), redirect_stderr(io.StringIO()):  # torch prints the graph if it fails
            return torch.export.export(root, (tensors,), dynamic_shapes=(free,), strict=False)
    except ModelError:
        raise
    except Exception:  # its solver fails in many ways; any other error occurs again below
        if not any_size:
            raise
        return _program(root, tensors, any_size=False)


@contextmanager
def _copied_sizes() -> Iterator[None]:
    """Allow ``deepcopy`` of symbolic sizes during the block: it returns the size itself, as for an integer."""
    torch.SymInt.__deepcopy__ = lambda size, memo: size  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.SymInt.__deepcopy__  # type: ignore[attr-defined]


def _is_plain(node: fx.Node) -> bool:
    """Return True unless a node calls a function of functorch (from ``torch.vmap``), which is no ATen operation."""
    return node.op != "call_function" or "_functorch" not in (getattr(node.target, "__module__", None) or "")


def as_attributes(backbone: nn.Module, program: Any, calls: list[tuple[str, Any]]) -> Exported:
    """Convert an exported program to a graph whose parameters and buffers are attributes with the backbone's names."""
    graph, signature = program.graph, program.graph_signature
    graph.owning_module = None  # its attributes belong to the backbone, not to the exported module
    # Tied tensors get one name: with two names, each would miss the units that read the other.
    first_name = {id(value): name for name, value in (*backbone.named_parameters(), *backbone.named_buffers())}
    exported = Exported(graph, {}, [], calls)
    _record_sizes(exported, program)
    exported.written = sorted(name.removeprefix("backbone.") for name in _drop_statistics(graph, signature))
    attributes = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            # Keep unread inputs because they are part of the signature.
            if node.name in attributes or node.name in constants:
                graph.erase_node(node)
        elif node.op == "placeholder" and node.name in attributes:
            name = attributes[node.name].removeprefix("backbone.")
            _replace_by_attribute(graph, node, first_name.get(id(operator.attrgetter(name)(backbone)), name))
        elif node.op == "placeholder" and node.name in constants:
            value = program.constants[constants[node.name]].detach().clone()
            name = f"_constant_{tensor_hash(value)[-16:]}"  # the same in both modes
            exported.constants[name] = value
            _replace_by_attribute(graph, node, name)
    _drop_unused_nodes(graph)
    graph.lint()
    return exported


def _replace_by_attribute(graph: fx.Graph, node: fx.Node, name: str) -> None:
    first = next(iter(n for n in graph.nodes if n.op != "placeholder"))
    with graph.inserting_before(first):
        attribute = graph.get_attr(name)
    attribute.meta = dict(node.meta)
    node.replace_all_uses_with(attribute)
    graph.erase_node(node)


def _record_sizes(exported: Exported, program: Any) -> None:
    names = program.graph_signature.user_inputs
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    shapes: list[tuple[Any, ...]] = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
    moving = [size.node for one in shapes for size in one if isinstance(size, torch.SymInt)]
    free = {str(size.expr) for size in moving if size.expr.is_symbol}
    exported.shapes = [tuple(str(size) if str(size) in free else int(size) for size in one) for one in shapes]
    if not moving:
        return
    first = [size.node for one in shapes for size in one[:1] if isinstance(size, torch.SymInt)]
    exported.batch = {symbol for node in first for symbol in node.expr.free_symbols}
    environment: Any = moving[-1].shape_env
    known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val  # by torch's version
    exported.sizes = {symbol: int(known[symbol]) for node in moving for symbol in node.expr.free_symbols}
    conditions = {environment.replace(guard.expr) for guard in environment.guards}
    exported.guards = sorted(PythonPrinter().doprint(c) for c in conditions if _is_size_condition(c, free))


def _is_size_condition(condition: Any, free: Collection[str]) -> bool:
    """Return True if a condition compares only input sizes, with each other or with a number."""
    # Conditions on sizes of intermediate values are ignored: nearly all concern torch's memory layout only.
    names = set(map(str, condition.free_symbols))
    return bool(names) and names <= set(free) and all(part.is_symbol or part.is_Integer for part in condition.args)


def _drop_statistics(graph: fx.Graph, signature: Any) -> set[str]:
    """Make norms leave running statistics unchanged; return the names of other buffers that ``forward`` writes to."""
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    buffer_of = {signature.inputs_to_buffers.get(n.name): n for n in graph.nodes if n.op == "placeholder"}
    written, features = set(), []
    for result, kind in zip(results, signature.output_specs, strict=True):
        if kind.kind.name == "USER_OUTPUT":
            features.append(result)
        # torch.export returns changed buffers as extra results. Running statistics belong to the copies of each task.
        # All tasks would share any other change, so it is reported.
        elif kind.kind.name == "BUFFER_MUTATION" and not _is_statistic(result, buffer_of[kind.target], kind.target):
            written.add(kind.target)
    output.args = tuple(features)
    for node in list(graph.nodes):
        if node.target in _NORMS_OF_EXPORT:
            args = _NORMS_OF_EXPORT[node.target](*node.args)
            args = (*args[:3], *map(_initial_statistic, args[3:5]), *args[5:], False)
            _replace_tuple(graph, node, ATEN.batch_norm.default, args)
        elif node.target is ATEN.native_dropout.default:
            _replace_tuple(graph, node, ATEN.dropout.default, node.args)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return written


def _is_statistic(result: fx.Node, buffer: fx.Node, name: str) -> bool:
    if name.endswith("num_batches_tracked"):
        # Each call adds one, so a norm called twice counts two.
        while result.target is ATEN.add.Tensor and result.args[1] == 1:
            result = result.args[0]  # type: ignore[assignment]
        return result is buffer
    return _initial_statistic(result) is buffer


def _initial_statistic(statistic: Any) -> Any:
    """Follow a running statistic back through its norm's updates, and return the graph node of its initial value."""
    while isinstance(statistic, fx.Node) and statistic.target is operator.getitem:
        norm, number = statistic.args
        if norm.target not in _NORMS_OF_EXPORT or number not in (3, 4):  # type: ignore[union-attr]
            break
        statistic = norm.args[number]  # type: ignore[union-attr, index]
    return statistic


_NORMS_OF_EXPORT: dict[Any, Callable[..., tuple[Any, ...]]] = {
    ATEN._native_batch_norm_legit_functional.default: lambda *args: args,
    ATEN._native_batch_norm_legit_no_training.default: lambda *args: (*args[:5], False, *args[5:]),
    ATEN._native_batch_norm_legit.no_stats: lambda *args: (*args[:3], None, None, *args[3:]),
}
"""Dict of norm operation in exported graphs to a function that returns ``batch_norm``'s arguments except the last."""


def _replace_tuple(graph: fx.Graph, node: fx.Node, target: Any, args: Any) -> None:
    """Replace a node that returns several tensors by a call of ``target`` that returns only the first tensor."""
    first = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    with graph.inserting_before(node):
        made = graph.call_function(target, tuple(args))
    made.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in first:
        user.replace_all_uses_with(made)


def _drop_unused_nodes(graph: fx.Graph) -> None:
    # Erase from the end, so that one pass also removes nodes read only by erased nodes.
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        checks = name.startswith(("aten._assert", "aten.sym_constrain")) or node.target is torch._check
        idle = node.target is ATEN.dropout.default and (not node.args[2] or node.args[1] == 0)
        if idle or node.target is ATEN.alias.default:
            node.replace_all_uses_with(node.args[0])
        if (node.op == "call_function" and (checks or not node.users)) or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)


# Removing in-place operations --------------------------------------------------------------------------------------


def inline_regions(module: fx.GraphModule) -> None:
    """Copy the nodes of nested regions (``torch.no_grad``, disabled autocast) into the surrounding graph."""
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
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _is_in_place(node))


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
            results = [_detach(graph, result) for result in results]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _detach(graph: fx.Graph, result: Any) -> Any:
    if not isinstance(result, fx.Node) or not isinstance(result.meta.get("val"), torch.Tensor):
        return result
    node = graph.call_function(ATEN.detach.default, (result,))
    node.meta = dict(result.meta)
    return node


def remove_in_place(graph: fx.Graph, batch_counters: frozenset[fx.Node]) -> bool:
    """Replace in-place operations by pure ones where this is safe; return True if no in-place operation is left."""
    left = False
    for node in list(graph.nodes):
        if not _is_in_place(node):
            continue
        written = node.args[0]
        counted = node.target is ATEN.add_.Tensor and written in batch_counters and node.args[1] == 1
        if counted and all(not user.users for user in written.users):
            graph.erase_node(node)
            continue
        functional = _out_of_place(node.target)
        if functional is None or not isinstance(written, fx.Node) or list(written.users) != [node]:
            left = True
        elif node.target is ATEN.detach_.default or _is_fresh(written):
            # The in-place form may have defaults that the other form lacks (bernoulli_).
            places = [place for place in node.target._schema.arguments if not place.kwarg_only]
            missing = (p.default_value for p in places[len(node.args) :] if p.name not in node.kwargs)
            node.target, node.args = functional, (*node.args, *missing)
        else:
            left = True
    return not left


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _out_of_place(target: Any) -> Any:
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    if f"{name}.{overload}" in _OTHER_NAMES:
        return _OTHER_NAMES[f"{name}.{overload}"]
    packet = getattr(ATEN, name.removesuffix("_"), None) if name.endswith("_") else None
    found = getattr(packet, overload, None)
    return found if found is not None and not found._schema.is_mutable else None


def _is_fresh(node: fx.Node) -> bool:
    """Return True if a node's result is in new memory that no other value shares."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if node.op != "call_function" or schema is None or any(result.alias_info for result in schema.returns):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return not composite or schema.name in _FRESH_COMPOSITES


# These composite operations always return new memory; the schema answers for all other operations.
_FRESH_COMPOSITES = frozenset(
    f"aten::{name}"
    for name in (
        *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "matmul"),
    )
)
_OTHER_NAMES = {"bernoulli_.float": ATEN.bernoulli.p, "bernoulli_.Tensor": None}


def _located_error(backbone: nn.Module, error: Exception) -> ModelError:
    """Return an error that names the innermost module whose forward raised ``error``, and the user's line."""
    names = {id(module): name for name, module in backbone.named_modules()}
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    name = ([names[id(owner)] for owner in owners if id(owner) in names] or [""])[-1]
    inner = f"{type(backbone.get_submodule(name)).__name__} {name!r} of " if name else ""
    theirs = next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(_LIBRARIES)]
    at = f", at {lines[-1].line!r}, line {lines[-1].lineno} of {os.path.basename(lines[-1].filename)}" if lines else ""
    return ModelError(
        f"{inner}{type(backbone).__name__} can't be exported by torch.export ({theirs}{at}). Take control flow that "
        f"depends on values out of its forward, or {advice_to_declare(name)}"
    )


_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")


def advice_to_declare(name: str, *options: str) -> str:
    """Return advice for an error message: how to declare a module frozen or task-owned (a copy per task)."""
    meaning = {"frozen": "trained only by the first task", "task_owned": "a copy per task"}
    ways = " or ".join(f"{option}=[{name or '…'!r}] ({meaning[option]})" for option in options or meaning)
    part = "declare the module that holds it:" if name else "move that part into a module of its own and declare it,"
    return (
        f"{part} MaskedModel(backbone, {ways}); or trace nothing: DisjointModel(backbone) takes any network, "
        "SubnetModel(backbone) one whose learning weights are those of Linear, Conv, Embedding and norms"
    )


def module_of(node: fx.Node) -> str:
    """Return the path, inside the backbone, of the module whose forward runs a node's operation."""
    paths = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return (paths[-1] if paths else "").removeprefix("backbone").removeprefix(".")


def describe(node: fx.Node) -> str:
    """Return a description of a node for error messages: its operation, module and line of code."""
    name, operation = module_of(node), str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    inside = f" in module {name!r}" if name else ""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    own = [i for i, line in enumerate(lines) if line.startswith("File ") and "site-packages" not in line]
    code = lines[own[-1] + 1] if own and own[-1] + 1 < len(lines) else ""
    return f"operation {operation!r}{inside}" + (f" ({code})" if code else "")
