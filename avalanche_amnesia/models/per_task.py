"""Container of modules that single tasks own, cheap to walk over where there is nothing to do."""

from __future__ import annotations

import torch
from torch import nn


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
            if module is not None and any(part.training != own for part in module.modules()):
                module.train(own)
        return self


def lies_on(module: nn.Module, device: torch.device) -> bool:
    """Tell whether all parameters and buffers of a module are on one device."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return all(t is None or t.device == device for t in tensors) and all(
        part is None or lies_on(part, device) for part in module._modules.values()
    )
