"""Export of a backbone in one mode to a functional graph of ATen operations."""

import io
import linecache
import os
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from avalanche_amnesia.unit_graph.backbones import Inputs, first_real, undisturbed
from avalanche_amnesia.unit_graph.declared_calls import DeclaredCalls
from avalanche_amnesia.unit_graph.exported import Exported, as_attributes, inline_regions, write_nothing
from avalanche_amnesia.unit_graph.findings import ModelError

PLAIN_AVERAGE = -1.0
"""Momentum that stands for None while a norm is exported: its own code would divide by a count that is not known."""
# torch.export takes the sizes 0 and 1 for constants; a batch of them would fix the number of samples.
EXPORTED_BATCH = 3
_one_at_a_time = threading.RLock()  # torch.export changes nn.Module itself while it traces, for all threads


class _Root(nn.Module):
    """The backbone under one signature: a list of tensors in, features out."""

    def __init__(self, backbone: nn.Module, inputs: Inputs, calls: DeclaredCalls) -> None:
        super().__init__()
        self.backbone, self._inputs, self._calls = backbone, inputs, calls

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
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
    """The features that a backbone returns: a tensor, or the one tensor with two axes in a tuple or mapping."""
    args, kwargs = inputs.arguments(backbone, tensors)
    result = backbone(*args, **kwargs)
    if isinstance(result, Tensor):
        return result
    leaves = {id(t): t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)}  # several heads pass on the same
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
    """Export a backbone in one mode."""
    calls = DeclaredCalls()
    root = _Root(backbone, inputs, calls)
    modules = dict(backbone.named_modules())
    whole = {name: modules[name] for name in (*frozen, *task_owned) if name in modules}  # the others are parameters
    with _one_at_a_time, undisturbed(backbone):
        root.train(training)
        # Frozen modules run in evaluation mode in both graphs: their running statistics would move with every task.
        for name in set(frozen) & whole.keys():
            whole[name].eval()
        calls.stand_in(root, whole, inputs)
        try:
            program = _functional_program(root, inputs)
        except ModelError:
            raise
        except Exception as error:  # torch.export raises whatever the backbone's own code raises
            raise _failure(backbone, error) from error
    return as_attributes(backbone, program, calls.seen)


def _functional_program(root: _Root, inputs: Inputs) -> Any:
    """Exported program of a root, in which nothing is written."""
    for module in root.modules():
        if isinstance(module, _NormBase) and module.momentum is None:
            module.momentum = PLAIN_AVERAGE
    tensors = inputs.tensors(inputs.batch(EXPORTED_BATCH, like=first_real(root)))
    tokens = not inputs.dtype.is_floating_point  # as many as the longest sample of a batch has
    program = _program(root, tensors, any_size=inputs.guessed or tokens)
    inline_regions(program.graph_module)
    signature = program.graph_signature
    if any(spec.kind.name == "CUSTOM_OBJ" for spec in signature.input_specs):
        raise ModelError(
            f"forward of {type(root.backbone).__name__} draws from a torch.Generator of its own, which no task's seed "
            "sets: leave generator= out, and draw only in training (if self.training: …), or use nn.Dropout"
        )
    counters = frozenset(
        node
        for node in program.graph.nodes
        if signature.inputs_to_buffers.get(node.name, "").endswith("num_batches_tracked")
    )
    # torch's own functionalisation takes any graph, but goes through all of it again: only where it must be.
    simple = write_nothing(program.graph, counters) and all(map(_is_plain, program.graph.nodes))
    return program if simple else program.run_decompositions({})


def _program(root: nn.Module, tensors: list[Tensor], *, any_size: bool) -> Any:
    """Exported program for batches of any size; of inputs too where that is asked, which takes longer, and works."""
    free = [dict.fromkeys(range(t.dim()) if any_size else [0], torch.export.Dim.AUTO) for t in tensors]
    try:
        with _copied_sizes(), redirect_stderr(io.StringIO()):  # it prints the graph that it gives up
            return torch.export.export(root, (tensors,), dynamic_shapes=(free,), strict=False)
    except ModelError:
        raise
    except Exception:  # its solver of inequalities gives up in many ways; what else it fails on, it fails on again
        if not any_size:
            raise
        return _program(root, tensors, any_size=False)


@contextmanager
def _copied_sizes() -> Iterator[None]:
    """Let a forward copy a symbolic size as it copies a whole number, which is its own copy."""
    torch.SymInt.__deepcopy__ = lambda size, memo: size  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.SymInt.__deepcopy__  # type: ignore[attr-defined]


def _is_plain(node: fx.Node) -> bool:
    """Tell whether a node is an operation, or works on sizes: torch.vmap leaves calls of its own."""
    target = node.target
    return node.op != "call_function" or "_functorch" not in (getattr(target, "__module__", None) or "")


# What it failed on -----------------------------------------------------------------------------------------------


def _failure(backbone: nn.Module, error: Exception) -> ModelError:
    name, line = _where_it_failed(backbone, error)
    kind = type(backbone).__name__
    inner = f"{type(backbone.get_submodule(name)).__name__} {name!r} of " if name else ""
    theirs = next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)
    reason, mend = next((ours for text, ours in _IN_WORDS.items() if text in theirs), (theirs, _NO_CONTROL))
    return ModelError(f"{inner}{kind} can't be exported by torch.export ({reason}{line}). {mend}, or {declaring(name)}")


_NO_CONTROL = "Take control flow that depends on values out of its forward"
_IN_WORDS = {
    "data-dependent": ("control flow on values of tensors", _NO_CONTROL),
    "deepcopy protocol": (
        "copy.deepcopy of a tensor that was computed, which torch can't train through either",
        "Copy it with x.clone(), or x.detach().clone() without gradients",
    ),
    ".numpy()": ("a tensor becomes an array of numpy, which no gradient passes", "Compute with torch"),
}
"""What torch says of common failures → the reason and a way out in our words."""


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
    meaning = {"frozen": "trained only by the first task", "task_owned": "a copy per task"}
    ways = " or ".join(f"{option}=[{name or '…'!r}] ({meaning[option]})" for option in options or meaning)
    if name:
        return f"declare the module that holds it: MaskedModel(backbone, {ways}); or {_NOTHING_TRACED}"
    return (
        f"move that part into a module of its own and declare it, MaskedModel(backbone, {ways}); or {_NOTHING_TRACED}"
    )


_NOTHING_TRACED = (
    "trace nothing: weight pools take any network, DisjointModel(backbone), and WSN one whose weights are those of "
    "Linear, Conv, Embedding and norms, or don't learn, SubnetModel(backbone)"
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
