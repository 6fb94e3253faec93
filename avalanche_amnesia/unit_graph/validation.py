"""Validation of a backbone: all that keeps it from being masked, and a copy with what can be fixed by itself."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.unit_graph.backbones import Inputs, check_backbone, first_real, inputs_of
from avalanche_amnesia.unit_graph.exporting import features_of
from avalanche_amnesia.unit_graph.findings import Finding, ModelError
from avalanche_amnesia.unit_graph.tracing import examine


def validate(backbone: nn.Module, input_shape: tuple[int, ...] | None = None, **options: Any) -> list[Finding]:
    """Findings that keep a backbone from being masked; empty where ``MaskedModel`` takes it.

    Args:
        backbone: any module.
        input_shape: as for :class:`~avalanche_amnesia.models.MaskedModel`.
        options: ``example``, ``classifier``, ``norm``, ``frozen``, ``task_owned`` as there.

    Raises:
        ValueError: for a norm or a name that is not known.
    """
    try:
        check_backbone(backbone)
        return examine(backbone, input_shape, **options)[1]
    except ModelError as error:  # not even a graph, or no input to run it on
        return [Finding(type(backbone).__name__, str(error), "see the message")]


def fix(backbone: nn.Module, input_shape: tuple[int, ...] | None = None, **options: Any) -> nn.Module:
    """A copy of a backbone with everything fixed that can be fixed without changing what it computes.

    Parametrisations that keep state (spectral norm) are baked in, and modules that forward never reads are removed;
    each only if features of random inputs stay as they are. What is left is in ``validate(fix(model))``.

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
        raise ModelError(f"{type(backbone).__name__} can't be copied ({error}); fix it by hand") from error
    inputs = inputs_of(backbone, input_shape, options.get("example"))
    expected = _features(model, inputs)
    tried: set[str] = set()
    while True:
        findings = [(str(finding), finding.change) for finding in validate(model, input_shape, **options)]
        changes = [(text, change) for text, change in findings if change is not None and text not in tried]
        if not changes:
            return model
        text, change = changes[0]
        tried.add(text)
        fixed = copy.deepcopy(model)
        change(fixed)
        if torch.allclose(_features(fixed, inputs), expected, rtol=1e-4, atol=1e-5, equal_nan=True):
            model = fixed


_SAMPLES = 4


@torch.no_grad()
def _features(model: nn.Module, inputs: Inputs) -> Tensor:
    batch = inputs.batch(_SAMPLES, like=first_real(model))
    return features_of(copy.deepcopy(model).eval(), inputs, inputs.tensors(batch))
