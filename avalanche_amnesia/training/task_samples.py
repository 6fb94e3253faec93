"""Samples of the task that has just been trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia.benchmarks.data import task_data

_MOST_BYTES = 2**31
"""Of samples in memory: 20,000 large photographs would be twelve gigabytes."""


def training_samples(strategy: Any, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples ``(n, …)`` of the task that a strategy has just trained, and their labels ``(n,)``."""
    experience = strategy.experience
    index = torch.randperm(len(experience.dataset), generator=torch.Generator().manual_seed(seed))[:most]
    of_one = task_data(experience, index[:1])[0].nbytes
    return task_data(experience, index[: max(1, _MOST_BYTES // of_one)].sort().values)
