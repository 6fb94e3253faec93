"""Weights of a backbone drawn anew, as its modules draw them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from avalanche_amnesia.seeding import preserved_rng, seed_all


@torch.no_grad()
def fresh_weights(backbone: nn.Module, seed: int) -> dict[str, Tensor]:
    """Parameter name → values of its shape, drawn by the ``reset_parameters`` of the module that holds it."""
    drawn: dict[str, Tensor] = {}
    with preserved_rng():
        seed_all(seed)
        for path, module in backbone.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset) and any(True for _ in module.parameters(recurse=False)):
                twin = copy.deepcopy(module)
                twin.reset_parameters()
                own = twin.named_parameters(recurse=False)
                drawn |= {f"{path}.{name}".removeprefix("."): value.detach() for name, value in own}
    return drawn
