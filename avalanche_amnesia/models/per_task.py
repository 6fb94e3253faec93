"""Container of modules that single tasks own, cheap to walk over where there is nothing to do."""

from __future__ import annotations

import torch
from torch import nn

from avalanche_amnesia.models.modes import every_part, set_modes
from avalanche_amnesia.models.own_modules import OwnModules


class PerTask(nn.ModuleDict):
    """Task label → module of the task alone; a change of mode passes by those that have the mode already.

    With hundreds of tasks the host's switches between training and evaluation would cost more than an evaluation. A
    module whose attribute ``learning`` is False stays in evaluation mode.
    """

    def train(self, mode: bool = True) -> PerTask:
        """As ``nn.Module``'s."""
        self.training = mode
        for module in filter(None, self._modules.values()):
            own = mode and vars(module).get("learning", True)
            parts = every_part(module)
            if not any(part.training != own for part in parts):
                continue
            if type(module).train in _SWITCHED_ALONE and all(type(p).train is nn.Module.train for p in parts[1:]):
                set_modes((part, own) for part in parts)
            else:  # a class may do more at a change of mode
                module.train(own)
        return self


_SWITCHED_ALONE = (nn.Module.train, OwnModules.train)
"""Changes of mode that do nothing but set the attribute, once ``learning`` was asked."""


def lies_on(module: nn.Module, device: torch.device) -> bool:
    """Tell whether all parameters and buffers of a module are on one device."""
    return all(
        tensor is None or tensor.device == device
        for part in every_part(module)
        for tensors in (part._parameters, part._buffers)
        for tensor in tensors.values()
    )
