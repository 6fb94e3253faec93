"""From a backbone to its torch.fx graphs, one for training and one for evaluation.

Modules of torch.nn stay whole, as do norms and whatever the user declares; everything else is traced through. Modules
of torch.nn that hide several weighted layers (attention, transformer layers) are traced through a forward written in
plain operations, so that every one of their weights is seen.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from avalanche_amnesia.models.graph import ModelError
from avalanche_amnesia.models.trees import leaves

Decomposition = Callable[..., Any]
DECOMPOSED: dict[type[nn.Module], Decomposition] = {}
# Stochastic depth of torchvision and timm branches on `self.training`; as a whole it scales a sample by 0 or 1/(1-p).
DROPS_BRANCHES = frozenset({"DropPath", "StochasticDepth", "DropBlock2d"})


class BackboneTracer(fx.Tracer):
    """torch.fx's tracer with this package's leaves.

    Args:
        leaves: names of further modules that stay whole.

    Attributes:
        failed_in: name of the innermost module whose forward could not be traced; empty: the backbone's own.
    """

    def __init__(self, leaves: Collection[str] = ()) -> None:
        super().__init__()
        self.leaves = frozenset(leaves)
        self.failed_in = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module stays one node of the graph."""
        if module_qualified_name in self.leaves or type(m).__name__ in DROPS_BRANCHES:
            return True
        if isinstance(m, nn.BatchNorm2d) and hasattr(m, "act"):
            return False  # timm's norm with an activation behind it
        if type(m).forward in _WHOLE_FORWARDS:
            return True
        return type(m) not in DECOMPOSED and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a module through its decomposition, where it has one."""
        decomposed = DECOMPOSED.get(type(m))
        if decomposed is not None and self.path_of_module(m) not in self.leaves:
            forward = functools.partial(decomposed, m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or self.path_of_module(m)
            raise


# A subclass with another name and the same forward is the same layer.
_WHOLE_FORWARDS = frozenset(
    kind.forward
    for kind in (
        *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm2d),
    )
)


@dataclass(frozen=True)
class Traces:
    """The graphs of a backbone, and the constant tensors that its forward made.

    Attributes:
        training: in training mode.
        evaluation: in evaluation mode; the same object where the two are equal.
        constants: by the name under which the graphs look for them.
    """

    training: fx.Graph
    evaluation: fx.Graph
    constants: dict[str, Tensor]


def trace_modes(backbone: nn.Module, leaves: Collection[str]) -> Traces:
    """Trace a backbone in both modes.

    Raises:
        ModelError: if it can't be traced.
    """
    twin = copy.deepcopy(backbone)  # a forward may write to buffers while it is traced
    constants: dict[str, Tensor] = {}
    graphs: dict[bool, fx.Graph] = {}
    for training in (True, False):
        tracer = BackboneTracer(leaves)
        try:
            graphs[training] = tracer.trace(twin.train(training), _other_arguments(twin))
        except Exception as error:  # torch.fx raises whatever the model's own code raises on a proxy
            name = tracer.failed_in
            kind = f"{type(twin.get_submodule(name)).__name__} {name!r} of " if name else ""
            raise ModelError(
                f"{kind}{type(backbone).__name__} can't be traced by torch.fx ({error}). Take data-dependent control "
                f"flow out of its forward, or {_declaring(name)}"
            ) from error
        _check_buffers(backbone, twin)
        _check_attributes(
            backbone, twin, {str(node.target) for node in graphs[training].nodes if node.op == "get_attr"}
        )
        registered = dict((*twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False)))
        for node in graphs[training].nodes:
            if not node.args and "input" in node.kwargs and "condition" not in node.kwargs:
                node.args, node.kwargs = (node.kwargs["input"],), {k: v for k, v in node.kwargs.items() if k != "input"}
            if node.op == "get_attr" and str(node.target) not in registered:
                value = operator.attrgetter(str(node.target))(twin)
                if value.requires_grad:
                    raise ModelError(
                        f"forward of {type(backbone).__name__} uses a tensor of shape {tuple(value.shape)} that learns "
                        "and is no parameter of the backbone, so that no mask would protect it; make it an "
                        "nn.Parameter of the module that uses it, and use it there as it is"
                    )
                same = (name for name, known in constants.items() if _equal(known, value))
                node.target = next(same, f"_constant_{len(constants)}")
                constants[node.target] = value
    if graphs[True].python_code("self").src == graphs[False].python_code("self").src:
        graphs[False] = graphs[True]
    return Traces(graphs[True], graphs[False], constants)


def _check_attributes(backbone: nn.Module, traced: nn.Module, read: Collection[str]) -> None:
    """Refuse a forward that replaces values of its modules' which it reads; what it only leaves behind is dropped.

    In a graph such values would stay as they are.

    Args:
        backbone: as it was.
        traced: its twin, behind a trace.
        read: names of the attributes that the trace read.
    """
    for path, module in traced.named_modules():
        before = vars(backbone.get_submodule(path))
        for attribute, value in list(vars(module).items()):
            if not any(isinstance(leaf, fx.Proxy) for leaf in leaves([value])):
                continue
            name = f"{path}.{attribute}".lstrip(".")
            if name in read or not isinstance(before.get(attribute, torch.empty(0)), Tensor):
                raise ModelError(
                    f"forward of {type(backbone).__name__} writes to {name!r}, which all tasks would share: keep "
                    "nothing between forwards, or use a norm or layer of torch.nn that does"
                )
            delattr(module, attribute)  # the next trace must not read what belongs to this one


def _check_buffers(backbone: nn.Module, traced: nn.Module) -> None:
    """Refuse a forward that changes buffers: in a graph they would stay as they are."""
    for (name, before), after in zip(backbone.named_buffers(), traced.buffers(), strict=True):
        owner, _, buffer = name.rpartition(".")
        if buffer == "num_batches_tracked" and isinstance(backbone.get_submodule(owner), _NormBase):
            continue  # a norm written out in operations: the task's own norm counts for itself
        if isinstance(after, fx.Proxy) or not _equal(before, after):
            raise ModelError(
                f"forward of {type(backbone).__name__} writes to buffer {name!r}, which all tasks would share; keep "
                f"what changes in a norm of torch.nn, or {_declaring(owner, 'task_owned')}"
            )


def _declaring(name: str, *options: str) -> str:
    """The way out by declaring a module; the backbone itself can't be declared."""
    meaning = {"frozen": "trained by the first task alone", "task_owned": "a copy per task"}
    ways = " or ".join(f"{option}=[{name or '…'!r}] ({meaning[option]})" for option in options or meaning)
    if name:
        return f"declare the module that holds it: MaskedModel(backbone, {ways})"
    return (
        f"move that part into a module of its own and declare it, MaskedModel(backbone, {ways}); "
        "SubnetModel(backbone) traces nothing"
    )


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same in all that they hold, NaN included."""
    return first.dtype == second.dtype and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))


def _other_arguments(backbone: nn.Module) -> dict[str, Any]:
    """What forward takes besides the input, at its defaults.

    Avalanche's multi-task modules take a task label too; their backbone has no use for it.
    """
    parameters = list(inspect.signature(backbone.forward).parameters.values())[1:]
    given = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {"task_labels": 0} if hasattr(backbone, "known_train_tasks_labels") else given


# torch.nn's composite modules, in plain operations -----------------------------------------------------------


def decomposes(kind: type[nn.Module]) -> Callable[[Decomposition], Decomposition]:
    """Register the plain forward of a module of torch.nn."""

    def register(forward: Decomposition) -> Decomposition:
        DECOMPOSED[kind] = forward
        return forward

    return register


@decomposes(nn.MultiheadAttention)
def _attention(
    module: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise ModelError("nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn has no masking rule")
    if key_padding_mask is not None:
        raise ModelError("nn.MultiheadAttention with a key_padding_mask has no masking rule")
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    heads = [
        F.linear(x, weights[i], biases[i]).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
        for i, x in enumerate((query, key, value))
    ]
    if isinstance(attn_mask, fx.Proxy):  # its type is not known yet
        attn_mask = attn_mask.tracer.create_proxy("call_function", _may_attend, (attn_mask,), {})
    elif attn_mask is not None:
        attn_mask = _may_attend(attn_mask)
    mixed = F.scaled_dot_product_attention(
        heads[0],
        heads[1],
        heads[2],
        attn_mask=attn_mask,
        dropout_p=module.dropout if module.training else 0.0,
        is_causal=is_causal and attn_mask is None,  # a hint about the mask
    )
    out = module.out_proj(mixed.transpose(1, 2).flatten(2))
    return (out if module.batch_first else out.transpose(0, 1)), None


def _may_attend(mask: Tensor) -> Tensor:
    """nn.MultiheadAttention's mask as scaled_dot_product_attention's: there True keeps apart, here it lets meet."""
    return ~mask if mask.dtype == torch.bool else mask


@decomposes(nn.TransformerEncoderLayer)
def _encoder_layer(
    module: nn.TransformerEncoderLayer,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    def attend(x: Any) -> Any:
        attended, _ = module.self_attn(
            x, x, x, key_padding_mask=src_key_padding_mask, attn_mask=src_mask, is_causal=is_causal
        )
        return module.dropout1(attended)

    def feed(x: Any) -> Any:
        return module.dropout2(module.linear2(module.dropout(module.activation(module.linear1(x)))))

    if module.norm_first:
        src = src + attend(module.norm1(src))
        return src + feed(module.norm2(src))
    src = module.norm1(src + attend(src))
    return module.norm2(src + feed(src))


@decomposes(nn.TransformerEncoder)
def _encoder(
    module: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    for layer in module.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return src if module.norm is None else module.norm(src)
