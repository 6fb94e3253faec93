"""Checks of what is given as a backbone, and runs that leave nothing behind in it."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from avalanche_amnesia import checks
from avalanche_amnesia.unit_graph.findings import ModelError


def check_backbone(backbone: nn.Module) -> None:
    """Check that a module can be a backbone: it has weights by now, and no heads of this package."""
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


@contextmanager
def undisturbed(backbone: nn.Module) -> Iterator[None]:
    """Attributes and modes of a backbone's modules, and the state of torch's random numbers, afterwards as before.

    Torch's own warnings and logs are kept back: what fails is said in our own errors. What is written into tensors
    stays written: inside, tensors are to be fake.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one fused operation instead of attention's layers
    try:
        with attributes_kept(list(backbone.modules())), same_draws(backbone), _quiet():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def attributes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Attributes, tensors and modes of modules, afterwards as before."""
    held = [(module, dict(vars(module))) for module in modules]
    parts: list[dict[str, Any]] = [part for m, _ in held for part in (m._parameters, m._buffers, m._modules)]
    inner = [(part, dict(part)) for part in parts]
    try:
        yield
    finally:
        for module, attributes in held:
            vars(module).clear()
            vars(module).update(attributes)
        for part, content in inner:
            part.clear()
            part.update(content)


@contextmanager
def same_draws(module: nn.Module) -> Iterator[None]:
    """The state of torch's random numbers afterwards as before, on every device that a module lies on."""
    with torch.random.fork_rng(devices=sorted({p.device.index for p in module.parameters() if p.is_cuda})):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
