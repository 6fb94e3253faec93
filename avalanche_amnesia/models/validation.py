"""Can a backbone be masked? All that stands in the way, and what can be mended by itself."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from avalanche_amnesia.models.findings import Finding
from avalanche_amnesia.models.graph import ModelError
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
    ones, modules that forward never reads removed. What is left is in ``validate(fix(model))``.

    Args:
        backbone: any module; not changed.
        input_shape: as for :class:`~avalanche_amnesia.models.MaskedModel`.
        options: as for :func:`validate`.
    """
    model = copy.deepcopy(backbone)
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    mended: set[str] = set()
    while True:
        found = [f for f in validate(model, input_shape, **options) if f.mends is not None and str(f) not in mended]
        if not found:
            return model
        mends = found[0].mends
        assert mends is not None
        mended.add(str(found[0]))
        mends(model)
