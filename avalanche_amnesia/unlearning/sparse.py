"""Some entries of a tensor, losslessly: one bit per entry that says which, and their values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseValues:
    """Values of chosen entries of a tensor.

    Attributes:
        chosen: packed bits, uint8 ``(⌈n/8⌉,)``, one per entry of the flattened tensor.
        values: of the chosen entries in order, ``(k,)``.
        shape: of the tensor.
    """

    chosen: Tensor
    values: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, where: Tensor) -> SparseValues:
        """The entries of ``tensor`` at which the bool tensor ``where`` is True."""
        bits = torch.from_numpy(np.packbits(where.detach().cpu().numpy().reshape(-1)))
        return cls(bits, tensor.detach().reshape(-1)[where.reshape(-1)].cpu().clone(), tuple(tensor.shape))

    @property
    def where(self) -> Tensor:
        """Bool tensor of the tensor's shape."""
        n = int(np.prod(self.shape, dtype=np.int64))
        return torch.from_numpy(np.unpackbits(self.chosen.numpy(), count=n).astype(bool)).reshape(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of bits and values."""
        return self.chosen.nbytes + self.values.nbytes
