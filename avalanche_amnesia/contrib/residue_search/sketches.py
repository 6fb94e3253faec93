"""Hashes and sketches of tensors, by which copies and parts of them are recognised."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.seeding import derive_seed

# Hashes find copies, in any type and shape. Sums of many entries with random signs (a count sketch, Charikar et al.
# 2002) keep inner products up to chance: they find a tensor that contains an update, beside others.

ENTRIES_PER_NUMBER = 16
"""A sketch gives away at most one number per this many entries."""

LARGEST, SMALLEST = 512, 32
"""Numbers of a sketch; a tensor too small for the smallest has none."""

TELLING = 16
"""Tensors with fewer entries are not looked for: too many others are equal to them by chance."""


def values_hash(tensor: Tensor) -> str:
    """SHA-256 of the values as float32, for any type and shape."""
    values = tensor.detach().cpu().reshape(-1).float().contiguous().numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()


def pattern_hash(chosen: Tensor) -> str:
    """SHA-256 of which entries a bool tensor chooses."""
    return hashlib.sha256(np.packbits(chosen.detach().cpu().reshape(-1).numpy()).tobytes()).hexdigest()


def telling(tensor: Tensor) -> bool:
    """Tell whether a tensor is large and varied enough for equality with it to mean something."""
    return tensor.numel() >= TELLING and bool((tensor != tensor.reshape(-1)[0]).any())


def sketch(tensor: Tensor, name: str) -> Tensor | None:
    """The sketch of a tensor, float64 ``(numbers,)``; None where it is too small for one."""
    n = tensor.numel()
    numbers = min(LARGEST, n // ENTRIES_PER_NUMBER)
    if numbers < SMALLEST:
        return None
    generator = torch.Generator().manual_seed(derive_seed(0, "sketch", name, n))
    group = torch.randint(numbers, (n,), generator=generator)
    sign = torch.randint(2, (n,), generator=generator).double().mul_(2).sub_(1)
    signed = tensor.detach().cpu().reshape(-1).double() * sign
    return torch.zeros(numbers, dtype=torch.float64).index_add_(0, group, signed)
