"""Export of a backbone to functional graphs of ATen operations, one for training and one for evaluation."""

from __future__ import annotations

import linecache
import operator
import os
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from avalanche_amnesia.unit_graph.backbones import attributes_kept, undisturbed
from avalanche_amnesia.unit_graph.declared_calls import DeclaredCall, DeclaredCalls
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.functional import ATEN, inline_regions, write_nothing
from avalanche_amnesia.unit_graph.inputs import Inputs, first_real

PLAIN_AVERAGE = -1.0
"""Momentum that stands for None while a norm is exported: its own code would divide by a count that is not known."""
# torch.export takes the sizes 0 and 1 for constants; a batch of them would fix the number of samples.
EXPORTED_BATCH = 3
_one_at_a_time = threading.RLock()  # torch.export changes nn.Module itself while it traces, for all threads


@dataclass
class Exported:
    """One mode's graph: placeholders are the inputs, parameters, buffers and constants are attributes.

    Attributes:
        graph: of ATen operations, none of which writes into its arguments.
        constants: tensors that the forward made or holds, by the name under which the graph looks for them.
        written: names of buffers that the forward changes, other than the statistics of norms.
        calls: of modules that were declared, in the order of their nodes.
        sizes: symbol of a size that may differ between inputs → the size that it had.
        batch: symbols of the number of samples, one per input; empty where it is fixed.
        shapes: of the inputs, with the name of its symbol for a size that is free.
        guards: conditions on these sizes, in Python, under which the forward takes the same path.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    written: list[str]
    calls: list[DeclaredCall]
    sizes: dict[Any, int] = field(default_factory=dict)
    batch: set[Any] = field(default_factory=set)
    shapes: list[tuple[int | str, ...]] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)

    def size(self, value: Any, batch: int) -> int:
        """A size, or another number, for some number of samples.

        Raises:
            ValueError: where it depends on values.
        """
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        known = self.sizes | dict.fromkeys(self.batch, batch)
        found = value.node.expr.subs(known)
        if found.free_symbols:
            raise ValueError(f"it depends on values ({value})")
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        return kind(found)


class _Root(nn.Module):
    """The backbone under one signature: a list of tensors in, features out, for each of some modes.

    Args:
        backbone: in the mode asked for, where it is one.
        inputs: that it takes.
        calls: of declared modules.
        modes: each with its features.
    """

    def __init__(self, backbone: nn.Module, inputs: Inputs, calls: DeclaredCalls, modes: Sequence[bool]) -> None:
        super().__init__()
        self.backbone, self._inputs, self._calls, self._modes = backbone, inputs, calls, modes
        self._parts = list(backbone.modules())  # themselves: torch.export puts proxies into their places

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if len(self._modes) == 1:
            return (self._features(tensors),)
        features = []
        for training in self._modes:
            with attributes_kept(self._parts):
                for module in self._parts:
                    module.training = training  # as nn.Module.train does
                # Each has its own: what returns its input as it is would stand before the other one's as well.
                features.append(self._features([ATEN.alias.default(tensor) for tensor in tensors]))
        return tuple(features)

    def _features(self, tensors: Sequence[Tensor]) -> Tensor:
        self._calls.begin(tensors)
        watched = _NoStrangers(self.backbone) if torch.compiler.is_exporting() else nullcontext()
        with watched:
            return features_of(self.backbone, self._inputs, tensors)


class _NoStrangers(TorchFunctionMode):
    """Refuses tensors that learn and are no parameters of the backbone: export would take them for constants."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._name = type(backbone).__name__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if type(leaf) in (Tensor, nn.Parameter) and leaf.requires_grad and leaf.is_leaf and not is_fake(leaf):
                raise ModelError(
                    f"forward of {self._name} uses a tensor of shape {tuple(leaf.shape)} that learns and is no "
                    "parameter of the backbone, so that no mask would protect it; make it an nn.Parameter of the "
                    "module that uses it, and keep modules in an nn.ModuleList, not in a plain list"
                )
        return func(*args, **(kwargs or {}))


def features_of(backbone: nn.Module, inputs: Inputs, tensors: Sequence[Tensor]) -> Tensor:
    """The features that a backbone returns: a tensor, or the one tensor with two axes in a tuple or mapping.

    Raises:
        ModelError: where there is none, or more than one.
    """
    args, kwargs = inputs.arguments(backbone, tensors)
    result = backbone(*args, **kwargs)
    if isinstance(result, Tensor):
        return result
    found = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point() and t.dim() == 2]
    if len(found) == 1:
        return found[0]
    raise ModelError(
        f"{type(backbone).__name__} returns a {type(result).__name__} with {len(found)} tensors of shape "
        "(batch, features), from which the features can't be told; wrap it in a module that returns one tensor"
    )


def export(
    backbone: nn.Module, inputs: Inputs, *, training: bool, frozen: Collection[str], task_owned: Collection[str]
) -> Exported:
    """Export a backbone in one mode.

    Args:
        backbone: left as it was.
        inputs: that it takes.
        training: the mode.
        frozen: names of parameters, and of modules that stay whole, in evaluation mode.
        task_owned: names of parameters, and of modules that stay whole.

    Raises:
        ModelError: if it can't be exported; names the module and the line.
    """
    calls = DeclaredCalls()
    root = _Root(backbone, inputs, calls, [training])
    whole = _modules_of(backbone, (*frozen, *task_owned))
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(undisturbed(backbone))
        root.train(training)
        # Frozen modules run in evaluation mode in both graphs: their running statistics would move with every task.
        for name in set(frozen) & whole.keys():
            whole[name].eval()
        stack.enter_context(calls.standing_in(root, whole, inputs))
        try:
            program, _ = _functional_program(root, inputs, [True, False] if inputs.guessed else [False])
        except ModelError:
            raise
        except Exception as error:  # torch.export raises whatever the backbone's own code raises
            raise _failure(backbone, error) from error
    exported, (features,) = _as_attributes(backbone, program, calls.seen)
    return replace(exported, graph=_graph_of(exported.graph, features))


def _modules_of(backbone: nn.Module, declared: Collection[str]) -> dict[str, nn.Module]:
    """The modules among the parts that are declared by name; the others are parameters."""
    modules = dict(backbone.named_modules())
    return {name: modules[name] for name in declared if name in modules}


def export_both(backbone: nn.Module, inputs: Inputs, declared: Collection[str] = ()) -> dict[bool, Exported] | None:
    """Export a backbone in both modes at once: what is worked out about shapes and guards is worked out once.

    Args:
        backbone: left as it was.
        inputs: that it takes.
        declared: names of its frozen and task-owned parts.

    Returns:
        By mode, training or not, what :func:`export` returns; None where that is to be asked: a module is declared, the
        backbone can't be exported, or does more in one mode than compute, so that the other would not begin as if it
        were alone.
    """
    plain = all(type(module).train is nn.Module.train and "train" not in vars(module) for module in backbone.modules())
    if not plain or _modules_of(backbone, declared):
        return None
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(undisturbed(backbone))
        calls, modes = DeclaredCalls(), (False, True)  # norms write their statistics in training mode
        root = _Root(backbone, inputs, calls, modes)
        stack.enter_context(calls.standing_in(root, {}, inputs))
        try:
            program, wrote_nothing = _functional_program(root, inputs, [inputs.guessed])
        except Exception:  # its own export says what is wrong, in its words
            return None
    signature = program.graph_signature
    kinds = {kind.kind.name for kind in signature.output_specs}
    exported, features = _as_attributes(backbone, program, [])
    if exported.written or not kinds <= {"USER_OUTPUT", "BUFFER_MUTATION"}:
        return None
    if exported.constants and not wrote_nothing:  # a tensor that no module registers may be what was written over
        return None
    read = [_behind(result) for result in features]
    if any(node.op == "call_function" and not _is_size(node) for node in read[0] & read[1]):
        return None
    graphs = (_graph_of(exported.graph, result) for result in features)
    return {mode: replace(exported, graph=graph) for mode, graph in zip(modes, graphs, strict=True)}


def _functional_program(root: _Root, inputs: Inputs, sizes: Sequence[bool]) -> tuple[Any, bool]:
    """Exported program of a root, in which nothing is written.

    Args:
        root: of a backbone that may be disturbed.
        inputs: that it takes.
        sizes: whether inputs are to be of any size, one after another until it works.

    Returns:
        The program, and whether its forward wrote over nothing that others may read.
    """
    for module in root.modules():
        if isinstance(module, _NormBase) and module.momentum is None:
            module.momentum = PLAIN_AVERAGE
    tensors = inputs.tensors(inputs.batch(EXPORTED_BATCH, like=first_real(root)))
    program = _program(root, tensors, sizes)
    inline_regions(program.graph_module)
    signature = program.graph_signature
    counters = frozenset(
        node
        for node in program.graph.nodes
        if signature.inputs_to_buffers.get(node.name, "").endswith("num_batches_tracked")
    )
    # torch's own functionalisation takes any graph, but goes through all of it anew: only where it must be.
    simple = write_nothing(program.graph, counters) and all(map(_is_plain, program.graph.nodes))
    return program if simple else program.run_decompositions({}), simple


def _program(root: nn.Module, tensors: list[Tensor], sizes: Sequence[bool]) -> Any:
    """Exported program for batches of any size, and for inputs of any size where that is asked for and works.

    That takes longer: it works out every inner size as a formula.
    """
    any_size, *others = sizes
    free = [dict.fromkeys(range(t.dim()) if any_size else [0], torch.export.Dim.AUTO) for t in tensors]
    try:
        return torch.export.export(root, (tensors,), dynamic_shapes=(free,), strict=False)
    except ModelError:
        raise
    except Exception:  # its solver of inequalities gives up in many ways; what else it fails on, it fails on again
        if not others:
            raise
        return _program(root, tensors, others)


def _is_plain(node: fx.Node) -> bool:
    """Tell whether a node is an operation, or works on sizes: torch.vmap leaves calls of its own."""
    target = node.target
    return node.op != "call_function" or "_functorch" not in (getattr(target, "__module__", None) or "")


# What torch.export returned, as one graph ------------------------------------------------------------------------


def _as_attributes(
    backbone: nn.Module, program: Any, calls: list[DeclaredCall]
) -> tuple[Exported, tuple[fx.Node, ...]]:
    """One graph of all modes, and its results, one per mode."""
    graph, signature = program.graph, program.graph_signature
    graph.owning_module = None  # its attributes are the backbone's, not those of what torch.export made
    # Tied tensors go by one name: under two, each would count only the units that read it there as its users.
    first_name = {id(value): name for name, value in (*backbone.named_parameters(), *backbone.named_buffers())}
    exported = Exported(graph, {}, [], calls)
    _take_sizes(exported, program)
    written = _drop_statistics(graph, signature)
    exported.written = sorted(name.removeprefix("backbone.") for name in written)
    attributes = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            # Inputs stay even if unread: they are the signature.
            if node.name in attributes or node.name in constants:
                graph.erase_node(node)
        elif node.op == "placeholder" and node.name in attributes:
            name = attributes[node.name].removeprefix("backbone.")
            _replace_by_attribute(graph, node, first_name.get(id(_look_up(backbone, name)), name))
        elif node.op == "placeholder" and node.name in constants:
            value = program.constants[constants[node.name]]
            name = f"_constant_{len(exported.constants)}"
            exported.constants[name] = value.detach().clone()
            _replace_by_attribute(graph, node, name)
    _drop_idle(graph)
    graph.lint()
    output = next(node for node in graph.nodes if node.op == "output")
    return exported, output.args[0]


def _behind(result: fx.Node) -> set[fx.Node]:
    """All nodes that a result is computed from, and itself."""
    found, left = {result}, [result]
    while left:
        new = set(left.pop().all_input_nodes) - found
        found |= new
        left += new
    return found


def _is_size(node: fx.Node) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node.meta.get("val")))


def _graph_of(graph: fx.Graph, result: Any) -> fx.Graph:
    """The graph of one result, with names that are the same whatever else was traced beside it."""
    found, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    wanted = _behind(result)
    for node in graph.nodes:
        if node.op == "placeholder" or node in wanted:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            name = node.name if node.op == "placeholder" else None
            copies[node] = found.create_node(node.op, node.target, args, kwargs, name)
            copies[node].meta = dict(node.meta)
    found.output(copies[result])
    return found


def _look_up(backbone: nn.Module, name: str) -> Any:
    return operator.attrgetter(name)(backbone)


def _replace_by_attribute(graph: fx.Graph, node: fx.Node, name: str) -> None:
    first = next(iter(n for n in graph.nodes if n.op != "placeholder"))
    with graph.inserting_before(first):
        attribute = graph.get_attr(name)
    attribute.meta = dict(node.meta)
    node.replace_all_uses_with(attribute)
    graph.erase_node(node)


def _take_sizes(exported: Exported, program: Any) -> None:
    names = program.graph_signature.user_inputs
    places = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    environment: Any = None
    for node in places:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        sizes: tuple[Any, ...] = tuple(value.shape)
        exported.shapes.append(tuple(str(size.node.expr) if _is_free(size) else int(size) for size in sizes))
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                symbols = size.node.expr.free_symbols
                environment = size.node.shape_env
                known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val  # by torch's version
                for symbol in symbols:
                    exported.sizes.setdefault(symbol, int(known[symbol]))
                if dim == 0:
                    exported.batch |= symbols
    if environment is not None:
        free = {size for shape in exported.shapes for size in shape if isinstance(size, str)}
        conditions = {environment.replace(guard.expr) for guard in environment.guards}
        exported.guards = sorted(PythonPrinter().doprint(c) for c in conditions if _compares_sizes(c, free))


def _is_free(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_symbol)


def _compares_sizes(condition: Any, free: Collection[str]) -> bool:
    """Tell whether a condition compares sizes of inputs with each other or with a number.

    Those on sizes of inner values are nearly all torch's own, about how memory lies, and decide nothing.
    """
    names = set(map(str, condition.free_symbols))
    return bool(names) and names <= set(free) and all(part.is_symbol or part.is_Integer for part in condition.args)


def _drop_statistics(graph: fx.Graph, signature: Any) -> set[str]:
    """Replace exported norms by plain calls, without the statistics that they leave in their buffers.

    Returns:
        Names of all other buffers that the forward changes.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    buffer_of = {signature.inputs_to_buffers.get(n.name): n for n in graph.nodes if n.op == "placeholder"}
    written, features = set(), []
    for result, kind in zip(results, signature.output_specs, strict=True):
        if kind.kind.name == "USER_OUTPUT":
            features.append(result)
        # torch.export returns changed buffers as further results. A norm's statistics are left to the tasks' own
        # copies; any other change would be shared by all tasks, and is reported.
        elif kind.kind.name == "BUFFER_MUTATION" and not _is_statistic(result, buffer_of[kind.target], kind.target):
            written.add(kind.target)
    output.args = (tuple(features),)
    for node in list(graph.nodes):
        if node.target in _NORMS_OF_EXPORT:
            _as_called(graph, node)
        elif node.target is ATEN.native_dropout.default:
            _replace_tuple(graph, node, ATEN.dropout.default, node.args)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return written


def _is_statistic(result: fx.Node, buffer: fx.Node, name: str) -> bool:
    if name.endswith("num_batches_tracked"):
        # One is added per call: a norm that is called twice counts twice.
        while result.target is ATEN.add.Tensor and result.args[1] == 1:
            result = result.args[0]  # type: ignore[assignment]
        return result is buffer
    return _before_norms(result) is buffer


def _before_norms(statistic: Any) -> Any:
    """The buffer that a norm's statistic was before the norm changed it, and other calls of it before."""
    while isinstance(statistic, fx.Node) and statistic.target is operator.getitem:
        norm, number = statistic.args
        if norm.target not in _NORMS_OF_EXPORT or number not in (3, 4):  # type: ignore[union-attr]
            break
        statistic = norm.args[number]  # type: ignore[union-attr, index]
    return statistic


_NORMS_OF_EXPORT: dict[Any, Callable[..., tuple[Any, ...]]] = {
    ATEN._native_batch_norm_legit_functional.default: lambda x, w, b, mean, var, training, momentum, eps: (
        *(x, w, b, mean, var, training, momentum, eps),
        False,
    ),
    ATEN._native_batch_norm_legit_no_training.default: lambda x, w, b, mean, var, momentum, eps: (
        *(x, w, b, mean, var, False, momentum, eps),
        False,
    ),
    ATEN._native_batch_norm_legit.no_stats: lambda x, w, b, training, momentum, eps: (
        *(x, w, b, None, None, training, momentum, eps),
        False,
    ),
}


def _as_called(graph: fx.Graph, node: fx.Node) -> None:
    args = _NORMS_OF_EXPORT[node.target](*node.args)
    _replace_tuple(graph, node, ATEN.batch_norm.default, (*args[:3], *map(_before_norms, args[3:5]), *args[5:]))


def _replace_tuple(graph: fx.Graph, node: fx.Node, target: Any, args: Any) -> None:
    """One operation in the place of one that returns several tensors, of which only the first is read."""
    first = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    with graph.inserting_before(node):
        made = graph.call_function(target, tuple(args))
    made.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in first:
        user.replace_all_uses_with(made)


def _drop_idle(graph: fx.Graph) -> None:
    # From the end, so that what only an erased node read goes in the same pass.
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        checks = name.startswith(("aten._assert", "aten.sym_constrain")) or node.target is torch._check
        idle = node.target is ATEN.dropout.default and (not node.args[2] or node.args[1] == 0)
        if idle or node.target is ATEN.alias.default:
            node.replace_all_uses_with(node.args[0])
        if (node.op == "call_function" and (checks or not node.users)) or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)


# What it failed on -----------------------------------------------------------------------------------------------


def _failure(backbone: nn.Module, error: Exception) -> ModelError:
    name, line = _where_it_failed(backbone, error)
    kind = type(backbone).__name__
    inner = f"{type(backbone.get_submodule(name)).__name__} {name!r} of " if name else ""
    reason = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
    if "data-dependent" in reason:
        reason = "control flow on values of tensors"
    return ModelError(
        f"{inner}{kind} can't be exported by torch.export ({reason.strip()}{line}). Take control flow that depends on "
        f"values out of its forward, or {declaring(name)}"
    )


def _where_it_failed(backbone: nn.Module, error: Exception) -> tuple[str, str]:
    """The innermost module whose forward was running, and the line of the user's own code."""
    names = {id(module): name for name, module in backbone.named_modules()}
    name, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(owner, nn.Module) and id(owner) in names:
            name = names[id(owner)]
        if not any(file.startswith(library) for library in _LIBRARIES):
            line = f", at {linecache.getline(file, number).strip()!r}, line {number} of {os.path.basename(file)}"
    return name, line


_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")


def declaring(name: str, *options: str) -> str:
    """Advice to declare a module, for error messages; the backbone itself can't be declared."""
    meaning = {"frozen": "trained by the first task alone", "task_owned": "a copy per task"}
    ways = " or ".join(f"{option}=[{name or '…'!r}] ({meaning[option]})" for option in options or meaning)
    if name:
        return f"declare the module that holds it: MaskedModel(backbone, {ways})"
    return (
        f"move that part into a module of its own and declare it, MaskedModel(backbone, {ways}); "
        "SubnetModel(backbone) traces nothing"
    )


# Where a node comes from ------------------------------------------------------------------------------------------


def name_of(node: fx.Node) -> str:
    """The operation of a node."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def module_of(node: fx.Node) -> str:
    """Path of the module in whose forward an operation stands."""
    paths = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return (paths[-1] if paths else "").removeprefix("backbone").removeprefix(".")


def where(node: fx.Node) -> str:
    """The operation, the module and the line of code of a node."""
    name = module_of(node)
    inside = f" in module {name!r}" if name else ""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    own = [i for i, line in enumerate(lines) if line.startswith("File ") and "site-packages" not in line]
    code = lines[own[-1] + 1] if own and own[-1] + 1 < len(lines) else ""
    return f"operation {name_of(node)!r}{inside}" + (f" ({code})" if code else "")
