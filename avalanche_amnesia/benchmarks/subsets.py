"""Stratified draws that depend on the seed and on their purpose only."""

import torch
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.seeding import derive_seed


def stratified(labels: Tensor, n: int, seed: int, purpose: str) -> Tensor:
    """The positions of ``n`` samples whose class shares are those of all samples, within one sample."""
    classes, counts = labels.unique(return_counts=True)
    total = len(labels)
    number = checks.integer(n)
    if number is None or not len(classes) <= number <= total:
        raise ValueError(
            f"{purpose}: {n!r} samples asked for; give an int from {len(classes)} (one per class) to {total} "
            f"(all there are)"
        )
    chosen = []
    for label, count in zip(classes.tolist(), _quotas(counts.tolist(), number), strict=True):
        where = (labels == label).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(derive_seed(seed, "subset", purpose, label))
        chosen.append(where[torch.randperm(len(where), generator=generator)[:count]])
    return torch.cat(chosen).sort().values


def _quotas(counts: list[int], n: int) -> list[int]:
    """Largest remainders, in integers so that no rounding differs between machines."""
    total = sum(counts)
    quotas = [count * n // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda i: -(counts[i] * n % total))
    for i in by_remainder[: n - sum(quotas)]:
        quotas[i] += 1
    return quotas
