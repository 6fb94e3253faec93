"""What a task leaves that tells of it, and whether tensors hold it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from avalanche_amnesia.models.weight_masks.mask_storage import pack_bits


@dataclass
class Residue:
    """What must be nowhere once a task is gone: its mask, its head and embedding, the values that it left."""

    mask: Tensor | None
    values: list[np.ndarray]

    def found_in(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a tensor is the mask, or holds more than chance's share of the values."""
        if self.mask is not None:
            packed = pack_bits(self.mask)
            for tensor in tensors:
                if tensor.shape == self.mask.shape and any(torch.equal(tensor > at, self.mask) for at in (0.0, 0.5)):
                    return True
                if tensor.dtype == packed.dtype and tensor.shape == packed.shape and torch.equal(tensor, packed):
                    return True
        held = np.unique(np.concatenate([integers(tensor) for tensor in tensors if tensor.dtype == torch.float32]))
        return any(len(own) > 4 and np.isin(own, held).mean() > 0.25 for own in self.values)


def integers(tensor: Tensor) -> np.ndarray:
    """The bits of a float32 tensor's distinct values."""
    return np.unique(tensor.detach().reshape(-1).contiguous().view(torch.int32).numpy())


def decay_alone(initial: Mapping[str, Tensor], optimizer: Optimizer, steps: int) -> np.ndarray:
    """Bits of all values to which a decoupled decay takes weights without a gradient (of pixels that are always dark).

    It takes them there in so many steps, in whatever task is trained, so that they tell nothing of any of them.
    """
    (group,) = optimizer.param_groups
    factor = 1 - group["lr"] * group.get("weight_decay", 0)
    values, found = [value.clone() for value in initial.values()], [np.empty(0, dtype=np.int32)]
    for _ in range(steps if isinstance(optimizer, AdamW) else 0):
        found += [integers(value.mul_(factor)) for value in values]
    return np.unique(np.concatenate(found))
