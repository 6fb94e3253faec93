"""Checks of what is given as a backbone."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from avalanche_amnesia import checks
from avalanche_amnesia.unit_graph.findings import ModelError


def check_backbone(backbone: nn.Module) -> None:
    """Check that a module can be a backbone: it has weights by now, and no heads of this package.

    Raises:
        TypeError: for what is no module, the class of one too.
        ModelError: for a model of this package, or a module that holds one; for lazy modules that have not run yet.
    """
    checks.instance("backbone", backbone, nn.Module, "a feature extractor, such as MLP(784)")
    kind = type(backbone).__name__
    for name, module in backbone.named_modules():
        if hasattr(module, "task_containers"):
            inner = f"module {name!r} of {kind}" if name else "the backbone"
            raise ModelError(
                f"{inner} is a {type(module).__name__}, which has heads and tasks of its own: give the feature "
                "extractor from which it was made, in a fresh copy"
            )
    tensors = (*backbone.named_parameters(), *backbone.named_buffers())
    lazy = sorted({name.rpartition(".")[0] or kind for name, tensor in tensors if is_lazy(tensor)})
    if lazy:
        raise ModelError(
            f"modules {lazy} of {kind} are lazy: their weights don't exist before they have run once. Run the backbone "
            "on one batch, backbone(x), before the model and its optimizer are made"
        )
