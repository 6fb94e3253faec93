"""Functions that check a backbone (feature extractor), find the inputs it takes, and run it without changing it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from avalanche.models.helper_method import MultiTaskDecorator
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import register_pytree_node

from avalanche_amnesia import checks
from avalanche_amnesia.unit_graph.findings import ModelError

_SIDES = (32, 28, 224, 64, 96, 128, 48, 16, 8, 256, 299, 384, 512)
_OTHER_SIDES = {
    (nn.Conv1d, nn.ConvTranspose1d): (1, (64, 128, 32, 256, 100, 16, 1024)),
    (nn.Conv3d, nn.ConvTranspose3d): (3, (16, 32, 8)),
}
"""Dict of types of first layers to the number of input axes besides channels, and the sizes to try for each axis."""
HEADS_OF_ITS_OWN = (
    ", which has a head of its own for each task, and this package adds heads: give the network without them, with an "
    "Identity for its classifier"
)
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_backbone(backbone: nn.Module) -> None:
    """Raise ModelError if a module can't be a backbone: parallel, compiled, with heads, sparse, lazy or on 'meta'."""
    checks.instance("backbone", backbone, nn.Module, "a feature extractor, such as MLP(784)")
    kind = type(backbone).__name__
    for name, module in backbone.named_modules():
        inner = f"module {name!r} of {kind}" if name else "the backbone"
        if isinstance(module, _PARALLEL):
            raise ModelError(f"{inner} is a {type(module).__name__}, whose copies no mask reaches: give its .module")
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{inner} was compiled by torch.jit, and can't be read or copied: give the module it was made from"
            )
        if hasattr(module, "task_parts"):
            raise ModelError(
                f"{inner} is a {type(module).__name__}, with own heads: give the feature extractor, in a fresh copy"
            )
        if isinstance(module, MultiTaskDecorator):
            raise ModelError(f"{inner} was made by as_multitask(){HEADS_OF_ITS_OWN}")
        if isinstance(module, _BatchNorm) and not module.track_running_stats:
            warnings.warn(
                f"{type(module).__name__} {name!r} of {kind} has track_running_stats=False: predictions depend on the "
                "mini-batch in evaluation too. Use track_running_stats=True, or a norm of single samples (GroupNorm)",
                stacklevel=1,  # one place, so that Python shows the text once
            )
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ModelError(
                f"{type(module).__name__} {name!r} of {kind} has sparse=True: masks need dense gradients, sparse=False"
            )
    tensors = (*backbone.named_parameters(), *backbone.named_buffers())
    if any(tensor.is_meta for _, tensor in tensors):
        raise ModelError(f"{kind} is on the device 'meta', without values: give it some, as on a CPU, and wrap it then")
    if lazy := sorted({name.rpartition(".")[0] or kind for name, tensor in tensors if is_lazy(tensor)}):
        raise ModelError(
            f"modules {lazy} of {kind} are lazy: run the backbone on a batch before model and optimizer are made"
        )


@contextmanager
def preserve_state(backbone: nn.Module) -> Iterator[None]:
    """Restore the attributes and modes of a backbone's modules, and torch's random state, after the block.

    Torch's own warnings and logs are suppressed, because failures are reported in our own errors. Writes into
    tensors are not undone: use fake tensors inside the block.
    """
    fast, logs = torch.backends.mha.get_fastpath_enabled(), logging.root.manager.disable
    parts = ((vars(m), m._parameters, m._buffers, m._modules) for m in backbone.modules())
    held: list[tuple[dict[str, Any], dict[str, Any]]] = [(part, dict(part)) for of_one in parts for part in of_one]
    torch.backends.mha.set_fastpath_enabled(False)  # one fused operation instead of attention's layers
    logging.disable(logging.CRITICAL)
    try:
        with preserve_random_state(backbone), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logs)
        torch.backends.mha.set_fastpath_enabled(fast)
        for part, content in held:
            part.clear()
            part.update(content)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run the block in evaluation mode without gradients, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def in_batches(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``run(x)`` on the CPU, computed in evaluation mode on the model's device, 512 samples at a time."""
    device = next(model.parameters()).device
    with evaluation_mode(model):
        return torch.cat([run(part.to(device)).cpu() for part in x.split(512)])


@contextmanager
def preserve_random_state(module: nn.Module) -> Iterator[None]:
    """Restore torch's random state after the block, on every device that the module uses."""
    with torch.random.fork_rng(devices=sorted({p.device.index for p in module.parameters() if p.is_cuda})):
        yield


# Inputs: one tensor, several, or a mapping of tensors, with the samples along the first axis ------------------------


class NamedTensors(Mapping[Any, Any]):
    """A batch of several named tensors, with some methods of a tensor: ``to``, ``split``, ``numel``, ``device``.

    Args:
        tensors: name → ``(batch, …)``.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, key: Any) -> Any:
        """Return the tensor named ``key`` (a string), or a batch of the samples at the positions ``key``."""
        if isinstance(key, str):
            return self._tensors[key]
        return NamedTensors({name: tensor[key] for name, tensor in self._tensors.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(next(iter(self._tensors.values())))

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return next(iter(self._tensors.values())).device

    def numel(self) -> int:
        """Return the total number of entries of all tensors."""
        return sum(tensor.numel() for tensor in self._tensors.values())

    def to(self, *args: Any, **kwargs: Any) -> NamedTensors:
        """Return a batch with every tensor moved or converted, as by ``Tensor.to``."""
        return NamedTensors({name: tensor.to(*args, **kwargs) for name, tensor in self._tensors.items()})

    def split(self, size: int) -> list[NamedTensors]:
        """Return consecutive batches of at most ``size`` samples, as ``Tensor.split`` does."""
        return [self[start : start + size] for start in range(0, len(self), size)]


register_pytree_node(
    NamedTensors,
    lambda batch: ([batch[name] for name in batch], list(batch)),
    lambda tensors, names: NamedTensors(dict(zip(names, tensors, strict=True))),
)


def as_batch(x: Any) -> Any:
    """Return a tensor unchanged, or a mapping of tensors as NamedTensors; raise TypeError for any other ``x``."""
    tensors = list(x.values()) if isinstance(x, Mapping) else [x]
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        inside = f" of {[type(each).__name__ for each in tensors]}" if isinstance(x, Mapping) else ""
        raise TypeError(
            "x must be a batch as the network takes it: a tensor (batch, …), or a mapping of tensors by the names of "
            f"its arguments; got {type(x).__name__}{inside}"
        )
    return NamedTensors(x) if isinstance(x, Mapping) else x


def run_backbone(backbone: nn.Module, x: Any) -> Any:
    """Return a backbone's result for a batch ``x``: a tensor, or a mapping from argument names to tensors."""
    return backbone(**x) if isinstance(x, Mapping) else backbone(x)


@dataclass(frozen=True)
class Inputs:
    """Shapes (without the batch axis), types and names of the tensors that a backbone takes as input."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...] = ()
    several: bool = False
    samples: tuple[Tensor, ...] = ()
    guessed: bool = False

    @classmethod
    def like(cls, example: Any) -> Inputs:
        """Return an ``Inputs`` with the shapes, types, names and first four samples of an example batch."""
        named = isinstance(example, Mapping)
        several = isinstance(example, (tuple, list))
        tensors = tuple(example.values()) if named else tuple(example) if several else (example,)
        wrong = [type(part).__name__ for part in tensors if not isinstance(part, Tensor)]
        if wrong or not tensors:
            raise TypeError(
                "example must be a batch as the backbone takes it: a tensor (batch, …), a tuple of tensors, or a "
                f"mapping of tensors by name; got {type(example).__name__}"
                + (f" with a {wrong[0]}" if wrong and (named or several) else "")
            )
        lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError(
                "example must hold the same number of samples in every tensor, at least one, got "
                f"{[tuple(tensor.shape) for tensor in tensors]}"
            )
        return cls(
            tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(map(str, example)) if named else (),
            several,
            tuple(tensor[:4].detach().clone() for tensor in tensors),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the first input tensor, without the batch axis."""
        return self.shapes[0]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first input tensor."""
        return self.dtypes[0]

    def batch(self, size: int, draw: torch.Generator | None = None, like: Tensor | None = None) -> Any:
        """Return a batch of ``size`` samples for the backbone: the example's samples repeated, or random numbers."""
        draw = torch.Generator().manual_seed(0) if draw is None else draw
        tensors = []
        for number, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            if self.samples:
                held = self.samples[number]
                tensor = held[torch.arange(size) % len(held)]
            elif dtype.is_floating_point:
                tensor = torch.randn(size, *shape, generator=draw).to(dtype)
            else:
                tensor = torch.randint(2, (size, *shape), generator=draw).to(dtype)
            if like is not None:
                tensor = tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)
            tensors.append(tensor)
        if self.names:
            return dict(zip(self.names, tensors, strict=True))
        return tuple(tensors) if self.several else tensors[0]

    def tensors(self, batch: Any) -> list[Any]:
        """Return the tensors of a batch as a list: one, or several in the order of the example batch."""
        if self.names:
            return [batch[name] for name in self.names]
        return list(batch) if self.several else [batch]

    def arguments(self, backbone: nn.Module, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the backbone's forward for a list of input tensors."""
        label = (0,) if hasattr(backbone, "known_train_tasks_labels") else ()  # a backbone does not read it
        if self.names:
            return label, dict(zip(self.names, tensors, strict=True))
        return (*tensors, *label), {}


def inputs_of(backbone: nn.Module, given: tuple[int, ...] | None, example: Any = None) -> Inputs:
    """Return the shapes and types of a backbone's inputs: from ``example``, the shape ``given``, or trial runs."""
    if example is not None:
        if given is not None:
            raise ValueError(f"give input_shape= or example=, not both; got {given} and an example")
        return Inputs.like(example)
    tokens = isinstance(next((m for m in backbone.modules() if not list(m.children())), None), nn.Embedding)
    dtype = torch.long if tokens else first_float(backbone).dtype
    with preserve_state(backbone), torch.no_grad():
        backbone.eval()
        if given is None:
            return Inputs((_find_input_shape(backbone, dtype),), (dtype,), guessed=True)
        shape = tuple(given)
        try:
            _try_shape(backbone, shape, dtype)
        except Exception as error:  # the user's module may raise any exception
            raise ModelError(f"{type(backbone).__name__} does not run on an input of shape {shape}: {error}") from error
    return Inputs((shape,), (dtype,))


def first_float(module: nn.Module) -> Tensor:
    """Return a module's first floating-point parameter, if possible a trainable one, or a new scalar if it has none."""
    real = [p for p in module.parameters() if p.is_floating_point()]
    return next((p for p in real if p.requires_grad), real[0] if real else torch.empty(()))


def try_input_shapes(backbone: nn.Module) -> Tensor | None:
    """Find an input shape by trial; return features of 2 samples, with undefined values, or None if no shape fits."""
    try:
        inputs = inputs_of(backbone, None)
        with preserve_state(backbone), torch.no_grad():
            backbone.eval()
            made = _try_shape(backbone, inputs.shape, inputs.dtype)
    except Exception:  # the backbone may raise any exception
        return None
    return made if isinstance(made, Tensor) and made.dim() == 2 else None


def _try_shape(backbone: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Run a backbone on two samples of a shape: without values (device ``meta``) or, if it needs any, on zeros."""
    inputs = Inputs((shape,), (dtype,))

    def run(copied: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return run_copied(backbone, copied, inputs.arguments(backbone, [x])[0])

    try:
        return run(lambda t: torch.empty_like(t, device="meta"), torch.empty((2, *shape), dtype=dtype, device="meta"))
    except Exception as error:  # the backbone may raise any exception
        if "meta" not in str(error).lower():
            raise
    return run(torch.clone, torch.zeros((2, *shape), dtype=dtype, device=first_float(backbone).device))


def run_copied(backbone: nn.Module, made: Callable[[Tensor], Tensor], args: tuple[Any, ...]) -> Any:
    """Return a module's result for ``args``, with each parameter and buffer ``t`` replaced by a copy ``made(t)``."""
    # List each module under one name: functional_call would take the copy for the original under a second name.
    state = {
        f"{prefix}.{name}".lstrip("."): made(value)
        for prefix, inner in backbone.named_modules()
        for name, value in (*inner._parameters.items(), *inner._buffers.items())
        if value is not None
    }
    return functional_call(backbone, state, args, tie_weights=False)


def _find_input_shape(backbone: nn.Module, dtype: torch.dtype) -> tuple[int, ...]:
    found: tuple[tuple[int, ...], torch.Size] | None = None
    unlike: tuple[int, ...] | None = None
    first_error = ""
    first = _first_weighted(backbone)
    for shape in _candidate_shapes(backbone):
        try:
            result = _try_shape(backbone, shape, dtype)
        except Exception as error:  # the next candidate may work
            first_error = first_error or str(error)
            continue
        if not isinstance(result, Tensor) or result.dim() != 2 or len(result) != 2:  # not features: try the next one
            unlike = unlike or shape
            continue
        if found is not None and found[1] != result.shape:
            raise ModelError(
                f"the number of features depends on the size of the input ({tuple(found[1][1:])} from {found[0]}, "
                f"{tuple(result.shape[1:])} from {shape}); {_FIX}"
            )
        if found is not None:
            break
        found = shape, result.shape
        if isinstance(first, nn.Linear) and shape == (first.in_features,):  # rows; longer inputs would be sequences
            break
    if found is not None:
        return found[0]
    if unlike is not None:
        return unlike  # the caller examines the result and reports the error
    raise ModelError(f"no input was found on which {type(backbone).__name__} runs ({first_error}); {_FIX}")


_FIX = (
    "give input_shape=, the shape of one input without the batch, e.g. MaskedModel(backbone, input_shape=(1, 28, 28)), "
    "or a batch: example="
)


def _first_weighted(backbone: nn.Module) -> nn.Module | None:
    return next((m for m in backbone.modules() if getattr(m, "weight", None) is not None), None)


def _candidate_shapes(backbone: nn.Module) -> Iterator[tuple[int, ...]]:
    first = _first_weighted(backbone)
    for module in backbone.modules():
        for name in ("img_size", "image_size", "input_size"):
            side = getattr(module, name, None)
            depth = getattr(module, "in_channels", getattr(module, "in_chans", 3))
            if isinstance(side, int):
                yield (depth, side, side)
            elif isinstance(side, (tuple, list)) and len(side) == 2:
                yield (depth, *side)
    match first:
        case nn.Linear():
            yield (first.in_features,)
            yield from ((length, first.in_features) for length in (16, 10))
        case nn.Embedding():
            yield from ((length,) for length in (16, 10, 32, 64))
        case nn.LayerNorm() | nn.RMSNorm():
            yield tuple(first.normalized_shape)
            yield (16, *first.normalized_shape)
        case nn.BatchNorm1d():
            yield (first.num_features,)
            yield (first.num_features, 64)
    channels: Any = getattr(first, "in_channels", getattr(first, "num_features", None))
    axes, sides = next((known for kinds, known in _OTHER_SIDES.items() if isinstance(first, kinds)), (2, ()))
    yield from ((channels, *(side,) * axes) for side in sides)
    for count in (channels,) if isinstance(channels, int) else (3, 1):
        yield from ((count, side, side) for side in _SIDES)
    matrix = next((p for p in backbone.parameters() if p.dim() == 2), None)
    if matrix is not None:
        yield (matrix.shape[1],)
        yield (matrix.shape[0],)
    if isinstance(channels, int):
        yield from ((channels, *(side,) * axes) for side in range(1, 130))
