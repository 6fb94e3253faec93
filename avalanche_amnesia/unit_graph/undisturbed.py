"""Runs of a backbone that leave nothing behind in it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def undisturbed(backbone: nn.Module) -> Iterator[None]:
    """Attributes and modes of a backbone's modules, and the state of torch's random numbers, afterwards as before.

    Torch's own warnings and logs are kept back: what fails is said in our own errors. What is written into tensors
    stays written: inside, tensors are to be fake.
    """
    held = [(module, dict(vars(module))) for module in backbone.modules()]
    parts: list[dict[str, Any]] = [part for m, _ in held for part in (m._parameters, m._buffers, m._modules)]
    inner = [(part, dict(part)) for part in parts]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one fused operation in the place of attention's layers
    try:
        with same_draws(backbone), _quiet():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
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
