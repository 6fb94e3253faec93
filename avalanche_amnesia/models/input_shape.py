"""An input on which a backbone runs, where the user gave none."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.dry_run import dry_run
from avalanche_amnesia.models.graph import ModelError

_SIDES = (32, 28, 224, 64, 96, 128, 48, 16, 8, 256, 299, 384, 512)
_LENGTHS = (64, 128, 32, 256, 100, 16, 1024)


def runs_on(backbone: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a backbone makes of two inputs, as shape and type alone.

    Raises:
        Exception: whatever the backbone raises on them.
    """
    modes = [(module, module.training) for module in backbone.modules()]  # they need not all be the same
    arguments = (0,) if hasattr(backbone, "known_train_tasks_labels") else ()
    try:
        return dry_run(backbone.eval(), (torch.empty((2, *shape), dtype=dtype, device="meta"), *arguments))
    finally:
        for module, training in modes:
            module.training = training


def input_like(backbone: nn.Module, given: tuple[int, ...] | None) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape (without the batch) and type of an input of a backbone.

    Args:
        backbone: any module.
        given: the shape, if the user knows it.

    Raises:
        ModelError: if it does not run on the given shape, or if none can be found, or if the features' width depends
            on it.
    """
    real = next((p.dtype for p in backbone.parameters() if p.is_floating_point()), torch.get_default_dtype())
    tokens = isinstance(next((m for m in backbone.modules() if not list(m.children())), None), nn.Embedding)
    dtype = torch.long if tokens else real
    if given is not None:
        try:
            runs_on(backbone, tuple(given), dtype)
        except Exception as error:  # whatever the user's module raises
            raise ModelError(f"the backbone does not run on an input of shape {tuple(given)}: {error}") from error
        return tuple(given), dtype
    found: tuple[tuple[int, ...], torch.Size] | None = None
    unlike: tuple[int, ...] | None = None
    first_error = ""
    for shape in _candidates(backbone):
        try:
            result = runs_on(backbone, shape, dtype)
        except Exception as error:  # the next candidate may do
            first_error = first_error or str(error)
            continue
        if not isinstance(result, Tensor) or result.dim() != 2 or len(result) != 2:  # no features; try the next one
            unlike = unlike or shape
            continue
        if found is not None and found[1] != result.shape:
            raise ModelError(
                f"the number of features depends on the size of the input ({tuple(found[1][1:])} from {found[0]}, "
                f"{tuple(result.shape[1:])} from {shape}); {_MEND}"
            )
        if found is not None:
            break
        found = shape, result.shape
    if found is None and unlike is not None:
        return unlike, dtype  # what is wrong with its result is said where it is examined
    if found is None:
        raise ModelError(f"no input was found on which {type(backbone).__name__} runs ({first_error}); {_MEND}")
    return found[0], dtype


_MEND = (
    "give input_shape=, the shape of one input without the batch, e.g. MaskedModel(backbone, input_shape=(1, 28, 28))"
)


def _candidates(backbone: nn.Module) -> Iterator[tuple[int, ...]]:
    first = next((m for m in backbone.modules() if getattr(m, "weight", None) is not None), None)
    for module in backbone.modules():
        for name in ("img_size", "image_size", "input_size"):
            side = getattr(module, name, None)
            channels = getattr(module, "in_channels", getattr(module, "in_chans", 3))
            if isinstance(side, int):
                yield (channels, side, side)
            elif isinstance(side, (tuple, list)) and len(side) == 2:
                yield (channels, *side)
    match first:
        case nn.Linear():
            yield (first.in_features,)
            yield from ((length, first.in_features) for length in (16, 10))
        case nn.Conv1d() | nn.ConvTranspose1d():
            yield from ((first.in_channels, length) for length in _LENGTHS)
        case nn.Conv3d() | nn.ConvTranspose3d():
            yield from ((first.in_channels, side, side, side) for side in (16, 32, 8))
        case nn.Embedding():
            yield from ((length,) for length in (16, 10, 32, 64))
        case nn.LayerNorm() | nn.RMSNorm():
            yield tuple(first.normalized_shape)
            yield (16, *first.normalized_shape)
        case nn.BatchNorm1d():
            yield (first.num_features,)
            yield (first.num_features, 64)
    channels = getattr(first, "in_channels", getattr(first, "num_features", None))
    for count in (channels,) if isinstance(channels, int) else (3, 1):
        yield from ((count, side, side) for side in _SIDES)
    matrix = next((p for p in backbone.parameters() if p.dim() == 2), None)
    if matrix is not None:
        yield (matrix.shape[1],)
        yield (matrix.shape[0],)
    if isinstance(channels, int):
        axes = {nn.Conv1d: 1, nn.ConvTranspose1d: 1, nn.Conv3d: 3, nn.ConvTranspose3d: 3}.get(type(first), 2)
        yield from ((channels, *(side,) * axes) for side in range(1, 130))
