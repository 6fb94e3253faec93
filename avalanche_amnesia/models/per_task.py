"""Container of modules that single tasks own, cheap to walk over where there is nothing to do."""

from __future__ import annotations

import torch
from torch import nn

from avalanche_amnesia.models.modes import every_part


class PerTask(nn.ModuleDict):
    """Task label → module of the task alone; a change of mode passes by those that have the mode already.

    With hundreds of tasks the host's switches between training and evaluation would cost more than an evaluation. A
    module whose attribute ``learning`` is False stays in evaluation mode.
    """

    def train(self, mode: bool = True) -> PerTask:
        """As ``nn.Module``'s."""
        self.training = mode
        for module in self._modules.values():
            own = mode and getattr(module, "learning", True)
            if module is not None and any(part.training != own for part in every_part(module)):
                module.train(own)
        return self


def lies_on(module: nn.Module, device: torch.device) -> bool:
    """Tell whether all parameters and buffers of a module are on one device."""
    return all(
        tensor is None or tensor.device == device
        for part in every_part(module)
        for tensors in (part._parameters, part._buffers)
        for tensor in tensors.values()
    )
