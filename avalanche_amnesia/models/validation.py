"""Can a backbone be masked? All that stands in the way, and what can be mended by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.findings import Finding
from avalanche_amnesia.models.graph import ModelError
from avalanche_amnesia.models.input_shape import input_like
from avalanche_amnesia.models.multi_head import check_backbone
from avalanche_amnesia.models.tracing import examine


def validate(backbone: nn.Module, input_shape: tuple[int, ...] | None = None, **options: Any) -> list[Finding]:
    """Everything that keeps a backbone from being masked; empty where ``MaskedModel`` takes it.

    Args:
        backbone: any module.
        input_shape: as for :class:`~avalanche_amnesia.models.MaskedModel`.
        options: ``classifier``, ``norm``, ``frozen``, ``task_owned`` as there.

    Raises:
        ValueError: for a norm or a name that is not known.
    """
    try:
        return examine(backbone, input_shape, **options)[2]
    except ModelError as error:  # not even a graph, or no input to run it on
        return [Finding(type(backbone).__name__, str(error), "see the message")]


def fix(backbone: nn.Module, input_shape: tuple[int, ...] | None = None, **options: Any) -> nn.Module:
    """A copy of a backbone with everything mended that can be mended without changing what it computes.

    Parametrisations are baked in, forward hooks removed, tied parameters untied, in-place activations made ordinary
    ones, modules that forward never reads removed; each only if features of random inputs stay as they are. What is
    left is in ``validate(fix(model))``.

    Args:
        backbone: any module; not changed.
        input_shape: as for :class:`~avalanche_amnesia.models.MaskedModel`.
        options: as for :func:`validate`.

    Raises:
        ModelError: if the backbone can't be copied, or if no input is known to compare features on.
    """
    check_backbone(backbone)
    try:
        model = copy.deepcopy(backbone)
    except RuntimeError as error:  # tensors that are computed from parameters
        raise ModelError(f"{type(backbone).__name__} can't be copied ({error}); mend it by hand") from error
    shape, dtype = input_like(backbone, input_shape)
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(_SAMPLES, *shape, generator=generator)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    x = (real if dtype.is_floating_point else torch.zeros_like(real)).to(device, dtype)
    expected = _features(model, x)
    tried: set[str] = set()
    mends: Callable[[nn.Module], None] | None = _write_nothing_in_place
    while mends is not None:
        mended = copy.deepcopy(model)
        mends(mended)
        if torch.allclose(_features(mended, x), expected, rtol=1e-4, atol=1e-5, equal_nan=True):
            model = mended
        found = [f for f in validate(model, shape, **options) if f.mends is not None and str(f) not in tried]
        tried |= {str(finding) for finding in found[:1]}
        mends = found[0].mends if found else None
    return model


_SAMPLES = 4


@torch.no_grad()
def _features(model: nn.Module, x: Tensor) -> Tensor:
    arguments = (0,) if hasattr(model, "known_train_tasks_labels") else ()  # Avalanche's multi-task modules
    result: Tensor = copy.deepcopy(model).eval()(x, *arguments)
    return result


def _write_nothing_in_place(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
